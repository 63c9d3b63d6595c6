from __future__ import annotations

import hashlib
import json
import os
import re
import shutil

import pytest

from ddl_airflow.core.errors import SourceMissing, StagingError, TransferCorrupt
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.marker import sealed
from ddl_airflow.storage.publication import missing_from, publications, publish


class BreakingFolder(FolderStore):
    """Fails the transfer of keys that contain "bad", and the marker when told to."""

    breaks_marker = False

    def put(self, path, key, sha256, advance, left=()):
        if "bad" in key:
            raise StagingError(f"{self.uri}/{key}: lost")
        return super().put(path, key, sha256, advance)

    def put_bytes(self, key, body):
        if self.breaks_marker:
            raise StagingError(f"{self.uri}/{key}: lost")
        return super().put_bytes(key, body)

    def at(self, prefix):
        other = type(self)(self.path, f"{self.prefix}/{prefix}")
        other.breaks_marker = self.breaks_marker
        return other


def contents(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    files = {}
    for index in range(6):
        path = folder / f"{index}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([index]) * (index + 1))
        files[f"model/v {index}"] = path
    return files


def test_publish_puts_all_and_a_marker_that_lists_them(tmp_path, results):
    store = FolderStore(tmp_path / "out")
    done = publish(results, store, "m/1", marker={"training_id": "t1"})
    found = contents(tmp_path / "out" / "m" / "1" / done.name)
    marker = json.loads(found.pop("_SUCCESS"))
    assert found == {key: path.read_bytes() for key, path in results.items()}
    assert marker["training_id"] == "t1"
    assert [(f["key"], f["size"], f["sha256"]) for f in marker["files"]] == [
        (key, index + 1, hashlib.sha256(bytes([index]) * (index + 1)).hexdigest())
        for index, key in enumerate(sorted(results))
    ]
    assert done.uri == f"{store.uri}/m/1/{done.name}"
    assert [f.key for f in done.files] == sorted(results)
    assert publications(store.at("m/1")) == {done.name: marker}
    assert missing_from(store.at(f"m/1/{done.name}")) == []


def test_publish_again_sends_nothing(tmp_path, results):
    store = FolderStore(tmp_path / "out")
    first = publish(results, store, "m", marker={"n": 1})
    inodes = {p: p.stat().st_ino for p in (tmp_path / "out").rglob("*")}
    assert publish(results, store, "m", marker={"n": 1}) == first
    assert {p: p.stat().st_ino for p in (tmp_path / "out").rglob("*")} == inodes


def test_publish_puts_another_beside_one_that_was_changed_behind_its_back(tmp_path, results):
    store = FolderStore(tmp_path / "out")
    first = publish(results, store)
    store.put_bytes(f"{first.name}/model/v 2", b"bad")
    assert missing_from(store.at(first.name)) == ["model/v 2"]
    second = publish(results, store)
    assert second.name != first.name
    assert missing_from(store.at(second.name)) == []
    store.delete([f"{first.name}/_SUCCESS"])
    assert missing_from(store.at(first.name)) == ["_SUCCESS"]


def test_a_copy_is_whole_and_what_was_changed_in_it_is_found(tmp_path, results):
    """As of a backup, or of results that were moved: files have other times, which are the ETags
    of a folder, and others of another store's.
    """
    store = FolderStore(tmp_path / "out")
    name = publish(results, store).name
    copy = shutil.copytree(store.path, tmp_path / "copy", copy_function=shutil.copyfile)
    moved = FolderStore(copy)
    assert missing_from(moved.at(name)) == []
    assert publish(results, moved).name == name
    (copy / name / "model" / "v 2").write_bytes(b"bad")
    (copy / name / "model" / "v 3").write_bytes(b"short")
    assert missing_from(moved.at(name)) == ["model/v 2", "model/v 3"]


def test_the_newest_is_what_was_published_last_also_in_a_copy(tmp_path, results):
    store = FolderStore(tmp_path / "out")
    names = []
    for number in range(4):
        results["model/v 1"].write_bytes(b"%d" % number)
        names.insert(0, publish(results, store).name)
    for number, name in enumerate(names):  # as they were copied
        os.utime(tmp_path / "out" / name / "_SUCCESS", (number, number))
    assert list(publications(store)) == names
    for number, name in enumerate(names):  # as earlier versions published them
        marker = json.loads(store.read_bytes(f"{name}/_SUCCESS"))
        del marker["marked"]
        store.put_bytes(f"{name}/_SUCCESS", sealed(marker))
        os.utime(tmp_path / "out" / name / "_SUCCESS", (number, number))
    assert list(publications(store)) == names[::-1]


def test_publish_of_other_content_leaves_what_was_published(tmp_path, results):
    store = FolderStore(tmp_path / "out")
    first = publish(results, store)
    before = contents(tmp_path / "out" / first.name)
    results["model/v 1"].write_bytes(b"changed")
    results["new"] = results.pop("model/v 5")
    second = publish(results, store)
    assert contents(tmp_path / "out" / first.name) == before
    found = contents(tmp_path / "out" / second.name)
    assert found["model/v 1"] == b"changed"
    assert set(found) == {*results, "_SUCCESS"}
    assert set(publications(store)) == {first.name, second.name}


def test_what_a_killed_publication_left_is_no_publication_and_in_nobodys_way(tmp_path, results):
    """As after SIGKILL: no handler runs, so nothing is taken back."""
    store = FolderStore(tmp_path / "out")

    class Dies(FolderStore):
        def at(self, prefix):
            return Dies(self.path, f"{self.prefix}/{prefix}")

        def put_bytes(self, key, body):
            raise SystemExit  # before the marker

        def delete(self, keys):
            """Nobody is left who could."""

    with pytest.raises(SystemExit):
        publish({**results, "old": results["model/v 1"]}, Dies(tmp_path / "out"), "m")
    assert publications(store.at("m")) == {}
    done = publish(results, store, "m")
    assert set(contents(tmp_path / "out" / "m" / done.name)) == {*results, "_SUCCESS"}


@pytest.mark.parametrize("broken", ["file", "marker"])
def test_publish_that_fails_leaves_nothing_and_raises_the_first_error(tmp_path, results, broken):
    store = BreakingFolder(tmp_path / "out")
    if broken == "file":
        results["bad"] = results["model/v 3"]
    store.breaks_marker = broken == "marker"
    with pytest.raises(StagingError, match="lost"):
        publish(results, store, "m")
    assert list((tmp_path / "out").iterdir()) == []


def test_publish_that_fails_leaves_what_was_published_before(tmp_path, results):
    publish(results, FolderStore(tmp_path / "out"))
    before = contents(tmp_path / "out")
    results["bad"] = results["model/v 3"]
    with pytest.raises(StagingError, match="lost"):
        publish(results, BreakingFolder(tmp_path / "out"))
    assert contents(tmp_path / "out") == before


def test_publish_whose_files_all_fail_half_way_leaves_no_folder(tmp_path, results):
    class Garbles(FolderStore):
        def at(self, prefix):
            return Garbles(self.path, f"{self.prefix}/{prefix}")

        def put(self, path, key, sha256, advance, left=()):
            return super().put(path, key, "0" * 64, advance)

    with pytest.raises(TransferCorrupt, match="changed while it was copied"):
        publish(results, Garbles(tmp_path / "out"), "m")
    assert list((tmp_path / "out").iterdir()) == []


def test_publish_names_what_it_could_not_take_back(tmp_path, results):
    class Keeps(BreakingFolder):
        def delete(self, keys):
            raise StagingError("not allowed to delete")

    results["bad"] = results["model/v 3"]
    with pytest.raises(StagingError, match="lost Could not remove.*not allowed to delete"):
        publish(results, Keeps(tmp_path / "out"), workers=1)


@pytest.mark.parametrize("error", [StagingError("the answer is lost"), KeyboardInterrupt()])
def test_what_got_its_marker_stays_though_the_answer_was_lost(tmp_path, results, error):
    """Others may have found it by then, and have it in production."""

    class Loses(FolderStore):
        def at(self, prefix):
            return Loses(self.path, f"{self.prefix}/{prefix}")

        def put_bytes(self, key, body):
            super().put_bytes(key, body)
            raise error

        def exists(self, key):  # as a listing that is behind
            return False

    with pytest.raises(type(error)) as caught:
        publish(results, Loses(tmp_path / "out"), "m")
    (name,) = publications(FolderStore(tmp_path / "out" / "m"))
    if isinstance(error, StagingError):
        assert re.search(f"the answer is lost.*published all the same.*{name}", str(caught.value))
    assert missing_from(FolderStore(tmp_path / "out" / "m" / name)) == []
    assert publish(results, FolderStore(tmp_path / "out"), "m").name == name


def test_a_store_that_has_gone_is_not_asked_to_take_back_each_of_many(tmp_path, results):
    asked = []

    class Goes(BreakingFolder):
        def at(self, prefix):
            gone = Goes(self.path, f"{self.prefix}/{prefix}")
            gone.breaks_marker = True
            return gone

        def delete(self, keys):
            asked.extend(keys)
            raise StagingError("nobody answers")

    files = {f"{key} {n}": path for key, path in results.items() for n in range(10)}
    with pytest.raises(StagingError, match=r"lost Could not remove.*nobody answers.* more$"):
        publish(files, Goes(tmp_path / "out"))
    assert len(asked) == 2


def test_publish_of_a_file_that_is_missing_writes_nothing(tmp_path, results):
    results["gone"] = tmp_path / "gone"
    with pytest.raises(SourceMissing, match="gone"):
        publish(results, FolderStore(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["../x", "_SUCCESS/x", "model"])
def test_publish_refuses_keys(tmp_path, results, key):
    results[key] = results["model/v 1"]
    with pytest.raises(StagingError) as caught:
        publish(results, FolderStore(tmp_path / "out"))
    assert not caught.value.retryable
    assert not (tmp_path / "out").exists()


def test_publish_of_nothing_is_refused(tmp_path):
    with pytest.raises(StagingError, match="no files to publish"):
        publish({}, FolderStore(tmp_path / "out"))


def test_publish_sees_a_listing_that_differs(tmp_path, results):
    class Loses(FolderStore):
        def at(self, prefix):
            return Loses(self.path, f"{self.prefix}/{prefix}")

        def list(self):
            return super().list()[1:]

    with pytest.raises(TransferCorrupt, match="listing says None"):
        publish(results, Loses(tmp_path / "out"))
    assert contents(tmp_path / "out") == {}

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time

import pytest

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError, TransferCorrupt
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.store import CHUNK, StoredObject
from ddl_airflow.storage.transfer import missing_from, publications, publish, stage
from tests.limits import within


class BreakingFolder(FolderStore):
    """Fails the transfer of keys that contain "bad", and the marker when told to."""

    breaks_marker = False

    def get(self, obj, path, advance):
        if "bad" in obj.key:
            raise StagingError(f"{self.uri}/{obj.key}: lost")
        for _ in range(500):  # long, unless stopped
            advance(0)
            time.sleep(0.01)
        return super().get(obj, path, advance)

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


class HugeFolder(FolderStore):
    """Lists an object larger than any disk."""

    def list(self):
        return [StoredObject("huge", 2**60, "e")]


class OddKeys(FolderStore):
    """Lists what it is told to, as an object store may hold it."""

    def __init__(self, path, listing):
        super().__init__(path)
        self._listing = listing

    def list(self):
        return self._listing


@pytest.fixture
def source(tmp_path):
    store = FolderStore(tmp_path / "source")
    for index in range(5):
        store.put_bytes(f"part {index % 2}/ü{index}", bytes([index]) * (index * 1000))
    return store


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def contents(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_stage_makes_links_to_all_files_and_a_marker(tmp_path, source, cache):
    staged = stage(source, cache, tmp_path / "run" / "data")
    found = contents(tmp_path / "run" / "data")
    marker = json.loads(found.pop(".complete"))
    assert found == contents(tmp_path / "source")
    assert marker["fingerprint"] == staged.fingerprint
    assert (staged.fetched, staged.reused, staged.nbytes) == (5, 0, 10_000)
    assert [file.key for file in staged.files] == sorted(found)
    assert staged.uri == source.uri
    link = tmp_path / "run" / "data" / "part 0" / "ü0"
    assert link.is_symlink() and not os.path.isabs(os.readlink(link))
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["data"]


def test_staged_links_survive_a_move_of_the_workspace(tmp_path, source, cache):
    stage(source, cache, tmp_path / "ws" / "runs" / "data")
    shutil.move(tmp_path / "cache", tmp_path / "ws" / "cache")
    shutil.rmtree(tmp_path / "ws")
    stage(source, Cache(tmp_path / "ws" / "cache"), tmp_path / "ws" / "runs" / "data")
    (tmp_path / "ws").rename(tmp_path / "elsewhere")
    found = contents(tmp_path / "elsewhere" / "runs" / "data")
    del found[".complete"]
    assert found == contents(tmp_path / "source")


def test_stage_again_changes_nothing(tmp_path, source, cache):
    stage(source, cache, tmp_path / "data")
    before = (tmp_path / "data").stat().st_ino
    again = stage(source, cache, tmp_path / "data")
    assert (again.fetched, again.reused) == (0, 5)
    assert (tmp_path / "data").stat().st_ino == before


def test_stage_elsewhere_fetches_only_what_changed(tmp_path, source, cache):
    stage(source, cache, tmp_path / "one")
    source.put_bytes("part 1/ü1", b"new")
    source.put_bytes("more", b"more")
    second = stage(source, cache, tmp_path / "two")
    assert (second.fetched, second.reused) == (2, 4)
    assert (tmp_path / "two" / "part 1" / "ü1").read_bytes() == b"new"
    assert (tmp_path / "one" / "part 1" / "ü1").read_bytes() == bytes([1]) * 1000


def test_stage_changed_data_replaces_the_folder(tmp_path, source, cache):
    first = stage(source, cache, tmp_path / "data")
    source.delete(["part 0/ü0"])
    second = stage(source, cache, tmp_path / "data")
    assert second.fingerprint != first.fingerprint
    assert not (tmp_path / "data" / "part 0" / "ü0").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"source", "cache", "data"}


def test_stage_mends_a_lost_or_cut_blob(tmp_path, source, cache):
    stage(source, cache, tmp_path / "data")
    blobs = {obj.key: cache.path(source, obj) for obj in source.list()}
    blobs["part 1/ü1"].unlink()
    blobs["part 1/ü3"].chmod(0o644)
    blobs["part 1/ü3"].write_bytes(b"cut")
    assert stage(source, cache, tmp_path / "data").fetched == 2
    assert (tmp_path / "data" / "part 1" / "ü3").read_bytes() == bytes([3]) * 3000


def test_stage_into_an_empty_folder_but_not_over_a_users_files(tmp_path, source, cache):
    (tmp_path / "empty").mkdir()
    stage(source, cache, tmp_path / "empty")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_bytes(b"mine")
    with pytest.raises(StagingError, match="holds files that were not staged") as caught:
        stage(source, cache, tmp_path / "used")
    assert not caught.value.retryable
    assert contents(tmp_path / "used") == {"mine": b"mine"}


def test_stage_leaves_out_folder_placeholders(tmp_path, cache):
    real = FolderStore(tmp_path / "source").put_bytes("a/b", b"1")
    listing = [StoredObject("", 0, "e"), StoredObject("a/", 0, "e"), real]
    store = OddKeys(tmp_path / "source", listing)
    staged = stage(store, cache, tmp_path / "data")
    assert [file.key for file in staged.files] == ["a/b"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"../up": 1}, "is no path"),
        ({"a/": 1}, "is no path"),
        ({"a": 1, "a/b": 1}, "needs a folder"),
        ({"a": 1, ".complete/b": 1}, "needs a folder"),
    ],
)
def test_stage_refuses_keys_before_it_writes(tmp_path, cache, keys, said):
    listing = [StoredObject(key, size, "e") for key, size in keys.items()]
    store = OddKeys(tmp_path / "source", listing)
    with pytest.raises(StagingError, match=said):
        stage(store, cache, tmp_path / "data")
    assert list(tmp_path.iterdir()) == []


def test_stage_of_nothing_is_source_missing(tmp_path, cache):
    (tmp_path / "source").mkdir()
    with pytest.raises(SourceMissing, match="holds no objects.*Upload"):
        stage(FolderStore(tmp_path / "source"), cache, tmp_path / "data")
    with pytest.raises(SourceMissing, match="nowhere"):
        stage(FolderStore(tmp_path / "nowhere"), cache, tmp_path / "data")


def test_stage_of_more_than_the_disk_holds_fails_before_it_fetches(tmp_path, cache):
    with pytest.raises(NoSpace, match=r"needs 1,152,921,504,606,846,976 bytes, [\d,]+ are free"):
        stage(HugeFolder(tmp_path / "source"), cache, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_stage_stops_all_threads_at_the_first_error(tmp_path, cache):
    store = BreakingFolder(tmp_path / "source")
    large = bytes(CHUNK + 1)  # small ones of one folder of the cache come one after the other
    for index in range(20):
        FolderStore.put_bytes(store, "bad" if index == 1 else f"{index:02}", large)
    start = time.monotonic()
    with pytest.raises(StagingError, match="bad: lost"):
        stage(store, cache, tmp_path / "data", workers=20)
    assert time.monotonic() - start < within(3)
    assert not any(t.name.startswith("ddl-transfer") for t in threading.enumerate())
    assert not (tmp_path / "data").exists()
    assert contents(tmp_path / "cache" / "blobs") == {}


def test_stage_reports_progress_up_to_the_whole(tmp_path, source, cache):
    calls = []
    stage(source, cache, tmp_path / "one", progress=lambda *numbers: calls.append(numbers))
    assert calls[-1] == (10_000, 10_000, 5, 5)
    assert calls == sorted(calls) and len(calls) <= 3
    calls.clear()
    stage(source, cache, tmp_path / "two", progress=lambda *numbers: calls.append(numbers))
    assert calls == [(10_000, 10_000, 5, 5)]


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

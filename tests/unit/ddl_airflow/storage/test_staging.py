from __future__ import annotations

import json
import os
import shutil
import threading
import time
from operator import attrgetter

import pytest

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError
from ddl_airflow.core.selection import Selection
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.staging import check_stageable, list_dataset, stage
from ddl_airflow.storage.store import CHUNK, StoredObject
from tests.limits import within


class BreakingFolder(FolderStore):
    """Fails the transfer of keys that contain "bad"."""

    def get(self, obj, path, advance):
        if "bad" in obj.key:
            raise StagingError(f"{self.uri}/{obj.key}: lost")
        for _ in range(500):  # long, unless stopped
            advance(0)
            time.sleep(0.01)
        return super().get(obj, path, advance)


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


def test_what_may_not_be_read_need_not_be_where_it_is_left_out(trainer):
    """As the lost+found of a disk, which is root's alone."""
    data = trainer.place / "data"
    (data / "train").mkdir(parents=True)
    (data / "lost+found").mkdir(mode=0o700)
    (data / "train" / "a.tfrecord").write_text("x")
    (data / "gone.old").symlink_to("nowhere")
    os.mkfifo(data / "pipe.old")
    left_out = Selection(exclude=("lost+found/", "*.old"))
    chosen = (left_out, Selection(include=("/train/*.tfrecord",)))
    missing = {
        Selection(): "Permission denied|is not there|is no file",
        Selection(exclude=("*.old",)): "lost.found: Permission denied",
        Selection(exclude=("lost+found/", "/pipe.old")): "gone.old is a link to nowhere",
        Selection(exclude=("lost+found/", "gone*")): "pipe.old is no file",
        # What is in it may be one of these.
        Selection(include=("*.tfrecord",), exclude=("*.old",)): "lost.found: Permission denied",
    }
    store = FolderStore(data)
    os.seteuid(trainer.uid)
    try:
        for selection in chosen:
            (one,) = list_dataset(store, selection).objects
            assert one.key == "train/a.tfrecord"
        for selection, said in missing.items():
            with pytest.raises(StagingError, match=said):
                list_dataset(store, selection)
    finally:
        os.seteuid(0)


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


@pytest.mark.parametrize("by_another_run", [False, True])
def test_a_folder_of_hard_links_gets_what_replaces_a_damaged_blob(
    tmp_path, source, cache, by_another_run
):
    data = tmp_path / "run" / "data"
    stage(source, cache, data, closed_cache=True)
    right = contents(data)
    blob = cache.path(source, max(source.list(), key=attrgetter("size")))
    before = blob.stat()
    blob.chmod(0o644)
    blob.write_bytes(b"?" * before.st_size)
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert contents(data) != right

    assert list(cache.verify()) == [blob]
    if by_another_run:
        stage(source, cache, tmp_path / "other" / "data", closed_cache=True)
    again = stage(source, cache, data, closed_cache=True)

    assert contents(data) == right
    assert again.fetched == (0 if by_another_run else 1)


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
        ({"a": 1, ".complete": 1}, "'.complete' has the name of a file of ours.*exclude"),
        ({"a": 1, ".ddl-listing": 0}, "'.ddl-listing' has the name of a file of ours"),
        ({".ddl-failed": 1}, "'.ddl-failed' has the name of a file of ours"),
    ],
)
def test_stage_refuses_keys_before_it_writes(tmp_path, cache, keys, said):
    listing = [StoredObject(key, size, "e") for key, size in keys.items()]
    store = OddKeys(tmp_path / "source", listing)
    for refused in (
        lambda: stage(store, cache, tmp_path / "data"),
        lambda: check_stageable(store, cache, listing),
    ):
        with pytest.raises(StagingError, match=f"{store.uri}.*{said}") as caught:
            refused()
        assert not caught.value.retryable
    assert list(tmp_path.iterdir()) == []


def test_a_file_called_as_ours_is_so_only_at_the_top(tmp_path, cache):
    source = FolderStore(tmp_path / "source")
    source.put_bytes("day/.complete", b"of another tool")
    stage(source, cache, tmp_path / "data")
    assert (tmp_path / "data" / "day" / ".complete").read_bytes() == b"of another tool"


def test_a_name_that_is_no_text_is_said(tmp_path, cache):
    (tmp_path / "source").mkdir()
    with open(os.fsencode(tmp_path) + b"/source/caf\xe9.txt", "wb"):
        pass
    with pytest.raises(StagingError, match=r"'caf\\udce9.txt' is no text in UTF-8") as caught:
        stage(FolderStore(tmp_path / "source"), cache, tmp_path / "data")
    assert not caught.value.retryable and str(caught.value).encode()


def test_stage_of_nothing_is_source_missing(tmp_path, cache):
    (tmp_path / "source").mkdir()
    with pytest.raises(SourceMissing, match="holds no objects.*Upload"):
        stage(FolderStore(tmp_path / "source"), cache, tmp_path / "data")
    with pytest.raises(SourceMissing, match="nowhere"):
        stage(FolderStore(tmp_path / "nowhere"), cache, tmp_path / "data")


def test_what_went_since_it_was_listed_may_be_staged_by_the_next_try(tmp_path, source, cache):
    """Whether it is to be fetched, or is in the cache and asked for."""
    for in_cache in (False, True):
        if in_cache:
            stage(source, cache, tmp_path / "before")
        listed = source.list()
        source.delete([listed[-1].key])
        behind = OddKeys(source.path, listed)
        said = f"{listed[-1].key}.* It went since the data were listed"
        with pytest.raises(SourceMissing, match=said) as caught:
            stage(behind, cache, tmp_path / f"data {in_cache}")
        assert caught.value.retryable
        assert not [path for path in (tmp_path / "cache").rglob("*.part")]
        source.put_bytes(listed[-1].key, b"again")


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

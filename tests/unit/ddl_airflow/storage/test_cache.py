from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddl_airflow.core.errors import StagingError
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import FolderStore


def ignore(nbytes):
    pass


class SlowFolder(FolderStore):
    """Counts its transfers and takes its time over each."""

    def __init__(self, path):
        super().__init__(path)
        self.transfers = 0

    def get(self, obj, path, advance):
        self.transfers += 1
        time.sleep(0.1)
        return super().get(obj, path, advance)


class CutFolder(FolderStore):
    """Breaks off in the middle of each file."""

    def get(self, obj, path, advance):
        path.write_bytes(b"half")
        raise StagingError("connection lost")


def files_below(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_fetch_once_then_cached(tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    assert not cache.holds(store, obj)
    assert cache.fetch(store, obj, ignore) == "size"
    assert cache.holds(store, obj)
    assert cache.fetch(store, obj, ignore) == "cache"
    blob = cache.path(store, obj)
    assert blob.read_bytes() == b"content"
    assert blob.stat().st_mode & 0o777 == 0o444
    assert blob.parent.name == blob.name[:2]
    assert files_below(tmp_path / "cache") == [blob]


def test_fetch_again_when_the_blob_has_a_wrong_size(tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    cache.fetch(store, obj, ignore)
    blob = cache.path(store, obj)
    blob.chmod(0o644)
    blob.write_bytes(b"cont")
    assert cache.fetch(store, obj, ignore) == "size"
    assert blob.read_bytes() == b"content"


def test_concurrent_fetches_transfer_once(tmp_path):
    store, cache = SlowFolder(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    with ThreadPoolExecutor(6) as pool:
        checks = list(pool.map(lambda _: cache.fetch(store, obj, ignore), range(6)))
    assert store.transfers == 1
    assert sorted(checks) == ["cache"] * 5 + ["size"]


def test_failed_fetch_leaves_no_file_and_a_killed_one_is_cleared(tmp_path):
    good, cut = FolderStore(tmp_path / "data"), CutFolder(tmp_path / "data")
    cache = Cache(tmp_path / "cache")
    obj = good.put_bytes("a", b"content")
    with pytest.raises(StagingError, match="connection lost"):
        cache.fetch(cut, obj, ignore)
    assert files_below(tmp_path / "cache" / "blobs") == []
    blob = cache.path(good, obj)
    blob.with_name(blob.name + ".0123.part").write_bytes(b"left by a killed process")
    cache.fetch(good, obj, ignore)
    assert files_below(tmp_path / "cache" / "blobs") == [blob]


def test_waiting_for_another_stager_ends_when_told_to_stop(tmp_path):
    store, cache = SlowFolder(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    holding, release = threading.Event(), threading.Event()

    def hold(nbytes):
        holding.set()
        release.wait(10)

    def stop(nbytes):
        raise StagingError("told to stop")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(cache.fetch, store, obj, hold)
        assert holding.wait(10)
        with pytest.raises(StagingError, match="told to stop"):
            cache.fetch(store, obj, stop)
        release.set()
        assert other.result() == "size"

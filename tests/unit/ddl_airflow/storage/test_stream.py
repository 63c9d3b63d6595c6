"""A dataset that comes while others read it."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from ddl_airflow.core.errors import AccessDenied, NoSpace, StagingError, TransferCorrupt
from ddl_airflow.core.selection import Selection
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.staging import list_dataset, stage
from ddl_airflow.storage.stream import Stream
from tests.limits import until, within

KEYS = ["a", "b", "sub/c", "sub/d", "sub/e"]


class GatedFolder(FolderStore):
    """Sends an object when its gate is open."""

    def __init__(self, path):
        super().__init__(path)
        self.gates = {}
        self.asked = []
        self.error = None

    def get(self, obj, path, advance):
        self.asked.append(obj.key)
        while not self.gates[obj.key].wait(0.01):
            advance(0)
        if self.error is not None:
            raise self.error
        return super().get(obj, path, advance)


@pytest.fixture
def store(tmp_path):
    made = GatedFolder(tmp_path / "source")
    for index, key in enumerate(KEYS):
        made.put_bytes(key, bytes([index]) * 1000)
        made.gates[key] = threading.Event()
    return made


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


@pytest.fixture
def stream(store, cache, tmp_path):
    """stream(closed_cache=) -> one that is not begun, into tmp_path / "data"."""

    def make(**how):
        return Stream(store, cache, tmp_path / "data", list_dataset(store), **how)

    return make


def there(tmp_path):
    data = tmp_path / "data"
    found = (path for path in data.rglob("*") if path.is_file())
    return sorted(p.relative_to(data).as_posix() for p in found if p.name[0] != ".")


def opened(store, *keys):
    for key in keys:
        store.gates[key].set()


@pytest.mark.parametrize("closed_cache", [False, True])
def test_files_appear_whole_and_in_the_order_of_the_listing(
    stream, store, tmp_path, cache, closed_cache
):
    with stream(closed_cache=closed_cache) as coming:
        until(lambda: len(store.asked) == len(KEYS), 10)
        assert not coming.ready() and there(tmp_path) == []
        opened(store, "sub/c", "sub/e")  # which have to wait for the first
        until(lambda: len(list((tmp_path / "cache" / "facts").glob("*/*"))) == 2, 10)
        assert not coming.ready() and there(tmp_path) == []
        opened(store, "a")
        until(coming.ready, 10)
        assert there(tmp_path) == ["a"] and not coming.was_whole
        opened(store, "b")
        until(lambda: coming.count == 3, 10)
        assert there(tmp_path) == ["a", "b", "sub/c"]
        assert not (tmp_path / "data" / ".complete").exists()
        opened(store, "sub/d")
        done = coming.finish()
        assert coming.ready() and coming.was_whole
    assert there(tmp_path) == KEYS
    listing = (tmp_path / "data" / ".ddl-listing").read_text().splitlines()
    assert [json.loads(line) for line in listing] == KEYS
    assert [file.key for file in done.files] == KEYS and done.fetched == 5
    assert (tmp_path / "data" / "sub" / "d").read_bytes() == bytes([3]) * 1000
    assert (tmp_path / "data" / "a").is_symlink() is not closed_cache
    # As if it had been staged: nothing is to be done any more.
    before = (tmp_path / "data").stat().st_ino
    again = stage(store, cache, tmp_path / "data", closed_cache=closed_cache)
    assert again.fetched == 0 and (tmp_path / "data").stat().st_ino == before


def test_who_goes_on_fetches_nothing_again_and_has_what_came_at_once(
    stream, store, cache, tmp_path
):
    opened(store, "a", "b", "sub/d")
    with stream() as first:
        until(lambda: len(list((tmp_path / "cache" / "facts").glob("*/*"))) == 3, 10)
        until(lambda: first.count == 2, 10)
    assert first.finish() is None  # it was ended
    assert list((tmp_path / "cache").rglob("*.part")) == []
    assert there(tmp_path) == ["a", "b"]
    store.asked.clear()
    with stream() as second:
        until(second.ready, 10)
        assert there(tmp_path) == ["a", "b"] and not second.was_whole
        opened(store, "sub/c")
        until(lambda: second.count == 4, 10)
        opened(store, "sub/e")
        assert second.finish().fetched == 2
    assert sorted(store.asked) == ["sub/c", "sub/e"]
    with stream() as third:
        until(third.ready, 10)
        assert third.was_whole and third.finish().fetched == 0
    assert not any(p.name.startswith(".ddl-part") for p in tmp_path.iterdir())


def test_what_is_in_the_cache_is_whole_from_the_first_moment(stream, store, cache, tmp_path):
    opened(store, *KEYS)
    stage(store, cache, tmp_path / "elsewhere")
    with stream() as coming:
        until(coming.ready, 10)
        assert coming.was_whole
        assert coming.finish().fetched == 0
    assert there(tmp_path) == KEYS


def test_two_streams_of_the_same_data_fetch_it_once(stream, store, cache, tmp_path):
    other = Stream(store, cache, tmp_path / "other", list_dataset(store))
    with stream() as one, other as two:
        until(lambda: len(store.asked) == len(KEYS), 10)
        opened(store, *KEYS)
        assert one.finish().fetched + two.finish().fetched == len(KEYS)
    assert len(store.asked) == len(KEYS)
    assert (tmp_path / "other" / "sub" / "e").read_bytes() == bytes([4]) * 1000


@pytest.mark.parametrize("closed_cache", [False, True])
def test_an_error_is_raised_and_told_to_who_waits(stream, store, tmp_path, closed_cache):
    opened(store, "a")
    with stream(closed_cache=closed_cache) as coming:
        until(coming.ready, 10)
        store.error = AccessDenied("file://there/b: the keys have expired")
        opened(store, "b")
        until(lambda: (tmp_path / "data" / ".ddl-failed").exists(), 10)
        for ask in (coming.check, coming.ready, coming.finish):
            with pytest.raises(AccessDenied, match="b: the keys have expired"):
                ask()
    failed = tmp_path / "data" / ".ddl-failed"
    assert failed.read_text() == "AccessDenied: file://there/b: the keys have expired"
    if closed_cache:
        assert failed.stat().st_mode & 0o004
    store.error = None
    opened(store, *KEYS)
    with stream(closed_cache=closed_cache) as again:  # a retry
        assert again.finish().fetched == 4
    assert not failed.exists()


def test_an_error_before_the_folder_is_there(stream, store, tmp_path, monkeypatch):
    def full(*_):
        raise NoSpace("no room")

    monkeypatch.setattr("ddl_airflow.storage.staging._check_room", full)
    with stream() as coming, pytest.raises(NoSpace, match="no room"):
        coming.finish()
    assert not (tmp_path / "data").exists()


def test_data_that_changed_need_another_listing_and_no_other_try(stream, store, tmp_path):
    opened(store, "a")
    with stream() as coming:
        until(coming.ready, 10)
        store.put_bytes("b", b"another")
        opened(store, *KEYS)
        with pytest.raises(
            StagingError, match="b.* changed, or went, after.* Clear stage_data"
        ) as e:
            coming.finish()
    assert not e.value.retryable


def test_changed_data_are_told_though_not_all_of_the_place_may_be_listed(store, cache, tmp_path):
    """As where a disk's ``lost+found`` is left out."""
    os.mkfifo(tmp_path / "source" / "pipe.old")  # no listing of the whole place passes it
    left_out = Selection(exclude=("*.old",))
    listing = list_dataset(store, left_out)
    opened(store, "a")
    with Stream(store, cache, tmp_path / "data", listing, selection=left_out) as coming:
        until(coming.ready, 10)
        store.put_bytes("b", b"another")
        opened(store, *KEYS)
        with pytest.raises(StagingError, match="b changed, or went, after stage_data") as caught:
            coming.finish()
    assert not caught.value.retryable


def test_an_object_that_went_needs_another_listing(stream, store):
    opened(store, "a")
    with stream() as coming:
        until(coming.ready, 10)
        store.delete(["sub/e"])
        opened(store, *KEYS)
        with pytest.raises(StagingError, match="sub/e changed, or went") as caught:
            coming.finish()
    assert not caught.value.retryable


def test_damage_on_the_way_may_be_mended_by_another_try(stream, store):
    store.error = TransferCorrupt("b: sha256 is x, not y, fetched twice")
    opened(store, *KEYS)
    with stream() as coming, pytest.raises(TransferCorrupt, match="fetched twice") as caught:
        coming.finish()
    assert caught.value.retryable


def test_the_end_of_who_wants_it_ends_all_threads(stream, store):
    before = set(threading.enumerate())
    with stream():
        until(lambda: len(store.asked) == len(KEYS), 10)
    assert set(threading.enumerate()) <= before


def test_the_end_is_seen_while_the_store_is_asked_for_access(
    stream, store, cache, tmp_path, monkeypatch
):
    opened(store, *KEYS)
    stage(store, cache, tmp_path / "elsewhere")
    asked = []
    monkeypatch.setattr(store, "check_access", lambda obj: asked.append(obj) or time.sleep(0.4))
    with stream(workers=1):
        until(lambda: asked, 10)
    assert len(asked) < len(KEYS)


def test_the_end_is_seen_while_the_cache_is_cleaned(stream, cache):
    cache.root.mkdir()
    with cache.alone() as alone:
        assert alone
        began = time.monotonic()
        with stream():
            time.sleep(0.3)
        assert time.monotonic() - began < within(10)


def test_wait_for_the_rest_may_be_given_up(stream, store):
    asked = []
    with stream() as coming:
        assert coming.finish(lambda: asked.append(1) or len(asked) < 3) is None


def test_other_data_take_the_place_of_what_came_half(stream, store, cache, tmp_path):
    opened(store, "a", "b")
    with stream() as coming:
        until(lambda: coming.count == 2, 10)
    opened(store, *KEYS)
    store.delete(["a"])
    stage(store, cache, tmp_path / "data")
    assert there(tmp_path) == KEYS[1:]
    assert not (tmp_path / "data" / ".ddl-listing").exists()


@pytest.mark.parametrize("key", [".ddl-listing", ".ddl-failed", ".complete"])
def test_keys_that_would_take_the_place_of_our_files_are_refused(store, cache, tmp_path, key):
    store.put_bytes(f"{key}/x", b"")
    with pytest.raises(StagingError, match="needs a folder where"):
        stage(store, cache, tmp_path / "data")
    assert not store.asked

"""The index of a place of results: whole whoever writes."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddl_airflow.core.errors import AccessDenied
from ddl_airflow.lineage import index
from ddl_airflow.lineage.index import add, mark_removed, read_index
from ddl_airflow.storage.filesystem import FolderStore


def record(number, dag_id="digits"):
    return {
        "training_id": f"{dag_id}-{number}",
        "manifest": {"name": dag_id, "digest": "sha256:v2:m", "file": "m.yml"},
        "dataset": {"uri": "s3://b/d", "fingerprint": f"sha256:{number}", "files": 1, "bytes": 9},
        "code": {"digest": "sha256:c", "git_commit": None, "files": ["train.py"]},
        "run": {"dag_id": dag_id, "run_id": f"r{number}", "triggered_by": None, "parameters": {}},
        "environment": {"launcher": "local", "world_size": 2},
        "result": {"metrics": {"accuracy": number / 1e5}, "goodput": {"held_s": 3.0}, "files": []},
    }


def place(number, dag_id="digits"):
    return f"{dag_id}-{number}/{number:016x}-00000000"


def publish(store, number):
    """As an upload leaves it, without the index."""
    store.put_bytes(f"{place(number)}/lineage.json", json.dumps(record(number)).encode())
    store.put_bytes(f"{place(number)}/_SUCCESS", b"{}")


@pytest.fixture
def store(tmp_path):
    (tmp_path / "results").mkdir()
    return FolderStore(tmp_path / "results")


def known(store, **how):
    return [one["publication"] for one in read_index(store, **how)]


def new(store):
    return [obj.key for obj in store.list() if obj.key.startswith("_lineage/new/")]


def test_what_was_published_before_there_was_an_index_is_in_it(store):
    for number in range(3):
        publish(store, number)
    add(store, record(3), place(3))
    seen = []
    found = read_index(store, progress=lambda done, of: seen.append((done, of)))
    assert {one["publication"] for one in found} == {place(number) for number in range(4)}
    assert seen == [(1, 3), (2, 3), (3, 3)]
    # From here on no record is read.
    for number in range(3):
        store.delete([f"{place(number)}/lineage.json"])
    assert len(known(store)) == 4 and new(store) == []


def test_new_ones_are_merged_now_and_then_and_none_is_lost(store, monkeypatch):
    monkeypatch.setattr(index, "_MERGED_AT", 7)
    assert known(store) == []
    for number in range(40):
        add(store, record(number), place(number))
        assert len(new(store)) < 7
        assert len(known(store)) == number + 1


def test_many_write_and_read_at_once(store, monkeypatch):
    monkeypatch.setattr(index, "_MERGED_AT", 3)
    read_index(store)
    ended, missed = threading.Event(), []
    added: set[str] = set()

    def look():
        while not ended.is_set():
            before = set(added)
            missed.extend(before - set(known(store)))

    reader = threading.Thread(target=look)
    reader.start()

    def publish_one(number):
        add(store, record(number), place(number))
        added.add(place(number))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(publish_one, range(60)))
    ended.set()
    reader.join()
    assert missed == []
    assert set(known(store)) == {place(number) for number in range(60)}


def test_the_same_publication_again_keeps_its_time_and_its_place(store):
    add(store, record(1), place(1))
    (before,) = read_index(store)
    time.sleep(1.1)  # times are of whole seconds
    add(store, record(1), place(1))
    assert read_index(store) == [before]


def test_a_removed_one_is_known_as_that(store):
    publish(store, 1)
    read_index(store)
    mark_removed(store, place(1))
    (found,) = read_index(store)
    assert found["removed"] >= found["published"]
    mark_removed(store, "another/0000000000000000-00000000")  # nobody knows what it was
    assert len(known(store)) == 1


@pytest.mark.parametrize("body", [b"", b"\x1f\x8bnot", b'{"schema": "another"}'])
def test_a_damaged_index_is_made_again(store, body):
    publish(store, 1)
    assert known(store) == [place(1)]
    store.put_bytes("_lineage/index.json.gz", body)
    assert known(store) == [place(1)] == known(store)


def test_a_damaged_record_or_entry_hides_no_other(store):
    publish(store, 1)
    for number, text in ((2, b"{"), (3, b"[]"), (4, b'{"run": 3}')):
        store.put_bytes(f"{place(number)}/lineage.json", text)
        store.put_bytes(f"{place(number)}/_SUCCESS", b"{}")
        store.put_bytes(f"_lineage/new/{number}.json", text)
    assert known(store) == [place(1)]


def test_without_the_marker_nothing_is_published(store):
    publish(store, 1)
    store.put_bytes(f"{place(2)}/lineage.json", json.dumps(record(2)).encode())
    assert known(store) == [place(1)]


def test_who_may_only_read_is_answered_too(store, monkeypatch):
    publish(store, 1)

    def refused(*_):
        raise AccessDenied("you may not write")

    monkeypatch.setattr(FolderStore, "put_if", refused)
    assert known(store) == [place(1)] == known(store)

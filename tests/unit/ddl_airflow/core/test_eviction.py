import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ddl_airflow.core import eviction
from ddl_airflow.core.eviction import make_room


@pytest.fixture
def cache(tmp_path):
    """cache(name, nbytes, days=) -> a file of it, which was used so many days ago."""

    def make(name, nbytes=100, days=3.0):
        path = tmp_path / "cache" / "blobs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(nbytes))
        os.utime(path, (time.time() - days * 86400, 1e9))
        return path

    return make


def room(tmp_path, most, **needed):
    names = {f"blobs/{name}": nbytes for name, nbytes in needed.items()}
    return make_room(str(tmp_path / "cache"), str(tmp_path / "runs"), names, most)


def left(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache" / "blobs").iterdir())


def test_what_was_used_least_lately_goes_until_there_is_room(cache, tmp_path):
    for name, days in (("old", 9), ("older", 10), ("oldest", 11), ("new", 2)):
        cache(name, days=days)
    assert room(tmp_path, 400) == {"removed": 0, "bytes": 400}
    assert room(tmp_path, 400, coming=150) == {"removed": 2, "bytes": 350}
    assert left(tmp_path) == ["new", "old"]


def test_what_is_needed_stays_and_is_marked_as_used(cache, tmp_path):
    needed, cut = cache("needed", days=30), cache("cut", 40, days=30)
    cache("other", days=2)
    assert room(tmp_path, 0, needed=100, cut=100) == {"removed": 1, "bytes": 200}
    assert left(tmp_path) == ["cut", "needed"]
    assert room(tmp_path, 0) == {"removed": 0, "bytes": 140}  # that another job is being sent
    # rsync compares times, and sends again what has another one.
    assert [path.stat().st_mtime for path in (needed, cut)] == [1e9, 1e9]


def test_what_a_runs_data_are_links_to_stays(cache, tmp_path):
    blob = cache("of a long training", days=30)
    cache("of none", days=2)
    os.link(cache("of a copy", days=30), tmp_path / "another name")
    data = tmp_path / "runs" / "dag" / "training" / "data" / "day"
    data.mkdir(parents=True)
    (data / "file").symlink_to(os.path.relpath(blob, data))
    (data / "gone").symlink_to("nothing")
    assert room(tmp_path, 0) == {"removed": 1, "bytes": 200}
    assert left(tmp_path) == ["of a copy", "of a long training"]


def test_a_link_costs_a_look_at_itself_alone(cache, tmp_path, monkeypatch):
    """Who stages waits meanwhile, and runs may have millions."""
    data = tmp_path / "runs" / "dag" / "training" / "data"
    data.mkdir(parents=True)
    blobs = [cache(f"{number:064x}", days=30) for number in range(50)]
    for blob in blobs[::2]:
        (data / blob.name).symlink_to(os.path.relpath(blob, data))
    looked = []
    for of, name in ((os, "lstat"), (os, "stat"), (os.path, "realpath")):
        call = getattr(of, name)
        monkeypatch.setattr(
            of, name, lambda p, *a, call=call, **k: looked.append(p) or call(p, *a, **k)
        )
    kept = {
        blob.path
        for blob in eviction.evictable(
            [eviction.Blob(0, str(blob), 100, 1) for blob in blobs], 10**9, str(tmp_path / "runs")
        )
    }
    monkeypatch.undo()
    assert kept == {str(blob) for blob in blobs[1::2]}
    assert len(looked) < 5


def test_a_link_by_way_of_another_keeps_what_it_leads_to(cache, tmp_path):
    """As somebody may have put it there: what counts is what is read."""
    blob = cache("0" * 64, days=30)
    (tmp_path / "mine").symlink_to(blob)
    data = tmp_path / "runs" / "dag" / "training" / "data"
    data.mkdir(parents=True)
    (data / "file").symlink_to(tmp_path / "mine")
    cache("1" * 64, days=30)
    assert room(tmp_path, 0) == {"removed": 1, "bytes": 100}
    assert left(tmp_path) == ["0" * 64]


def test_two_at_once_wait_for_each_other(cache, tmp_path):
    cache("old")
    with open(tmp_path / "cache" / ".in-use", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=room, args=(tmp_path, 0))
        other.start()
        other.join(0.2)
        assert other.is_alive() and left(tmp_path) == ["old"]
    other.join()
    assert left(tmp_path) == []


def test_what_a_worker_knows_of_its_cache_stays(cache, tmp_path):
    """The host may be another worker, with a cache of its own."""
    cache("old", days=30)
    facts = cache("../facts/old.json", days=30)
    assert room(tmp_path, 0) == {"removed": 1, "bytes": 0}
    assert left(tmp_path) == [] and facts.exists()


def test_a_host_without_a_cache_gets_none(tmp_path):
    assert room(tmp_path, 10, coming=20) == {"removed": 0, "bytes": 20}
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_ends_it_before_anything_is_removed(cache, tmp_path, monkeypatch):
    cache("old")

    def refuse(path):
        if path.endswith("runs"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError):
        room(tmp_path, 0)
    assert left(tmp_path) == ["old"]


def test_it_needs_nothing_but_a_python(cache, tmp_path):
    cache("old")
    asked = [str(tmp_path / "cache"), str(tmp_path / "runs"), {}, 0]
    program = Path(eviction.__file__).read_text()
    program += f"\nprint(make_room(*{json.dumps(asked)}))"
    words = [sys.executable, "-SE", "-"]
    said = subprocess.run(
        words, input=program, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert said.stdout == "{'removed': 1, 'bytes': 0}\n"

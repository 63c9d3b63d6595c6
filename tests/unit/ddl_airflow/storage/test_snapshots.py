"""Checkpoints saved in a store while a training runs, and brought back."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil

import pytest

from ddl_airflow.core.errors import AccessDenied, StagingError, TransferCorrupt
from ddl_airflow.storage import snapshots
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.snapshots import Snapshots, TryIsOver, newest_in

CHUNK = 1000
CHANGES = ("put_bytes", "put_if", "delete")


class Killed(BaseException):
    """As SIGKILL: nothing of the process goes on."""


class Counted:
    """A store that counts what changes it, and dies before or after one of these."""

    def __init__(self, store, told):
        self._store, self.told = store, told

    def at(self, prefix):
        return Counted(self._store.at(prefix), self.told)

    def __getattr__(self, name):
        call = getattr(self._store, name)
        if name not in CHANGES:
            return call

        def counted(*arguments):
            if name == "delete":
                for key in arguments[0]:
                    self._count(name, key, lambda key=key: call([key]))
                return None
            return self._count(name, arguments[0], lambda: call(*arguments))

        return counted

    def _count(self, name, key, call):
        number = len(self.told["asked"])
        self.told["asked"].append((name, key))
        if self.told.get("before") == number:
            raise Killed
        result = call()
        if self.told.get("after") == number:
            raise Killed
        return result


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "store")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "work" / "result"
    (made / "checkpoints").mkdir(parents=True)
    return made


def of(store, folder, number=1, **facts):
    return Snapshots(
        store, folder, folder.parent, {"dataset": "d"} | facts, number, now=lambda: 17.0
    )


def write(folder, step, chance=None):
    """A checkpoint of 12 chunks, of which a step changes one; and the file that names it."""
    body = bytearray(random.Random(0).randbytes(12 * CHUNK))
    body[step % 12 * CHUNK] ^= 1
    for name, content in (
        (f"m-{step}.data-00000-of-00001", bytes(body)),
        (f"m-{step}.index", b"index %d" % step),
        ("checkpoint", b"m-%d" % step),
    ):
        new = folder / "checkpoints" / f".{name}"
        new.write_bytes(content)
        new.replace(folder / "checkpoints" / name)
        os.utime(folder / "checkpoints" / name, (1000 + step, 1000 + step))
    for old in folder.glob(f"checkpoints/m-{step - 1}.*"):
        old.unlink()


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_that_is_lost_comes_back_as_it_was(store, folder):
    write(folder, 1)
    (folder / "metrics.txt").write_text("0.5")
    (folder / "empty").touch()
    expected = contents(folder)
    saved = of(store, folder).save()
    assert (saved.files, saved.sent) == (5, 15) and saved.uri.endswith("/00000001.json")
    shutil.rmtree(folder)
    restored = of(store, folder, 2).restore()
    assert contents(folder) == expected
    assert (restored.files, restored.by_try, restored.made) == (5, 1, 17.0)
    assert newest_in(folder, folder.parent) == 1001.0  # by which the newest is found


def test_only_chunks_that_changed_are_sent_and_only_two_snapshots_kept(store, folder):
    told = {"asked": []}
    saving = of(Counted(store, told), folder)
    for step in range(1, 6):
        write(folder, step)
        told["asked"].clear()
        saved = saving.save()
        puts = [key for name, key in told["asked"] if name == "put_bytes"]
        # Of 12 chunks one has changed, and one has changed back; the index; the file of names.
        assert len(puts) == saved.sent == (14 if step == 1 else 4 if step == 2 else 3)
        told["asked"].clear()
        assert saving.save() is None and not told["asked"]
    keys = [obj.key for obj in store.list()]
    assert [key for key in keys if key.endswith(".json")] == ["00000004.json", "00000005.json"]
    needed = {
        chunk[0]
        for key in keys
        if key.endswith(".json")
        for file in json.loads(store.read_bytes(key))["files"]
        for chunk in file["chunks"]
    }
    assert {key.removeprefix("chunks/") for key in keys if key.startswith("chunks/")} == needed
    # What another process saves next is not sent again either.
    write(folder, 6)
    assert of(store, folder, 2).save().sent == 3


def operations(store, folder):
    """How many operations the third save takes."""
    told = {"asked": []}
    for step in (1, 2, 3):
        write(folder, step)
        told["asked"].clear()
        of(Counted(store, told), folder).save()
    return len(told["asked"])


@pytest.mark.parametrize("when", ["before", "after"])
def test_who_is_killed_at_any_operation_leaves_a_whole_snapshot(tmp_path, when):
    count = operations(FolderStore(tmp_path / "s"), made(tmp_path / "w"))
    assert count > 5
    for number in range(count):
        store, folder = FolderStore(tmp_path / f"s{number}"), made(tmp_path / f"w{number}")
        states = []
        for step in (1, 2):
            write(folder, step)
            states.append(contents(folder))
            of(store, folder).save()
        write(folder, 3)
        states.append(contents(folder))
        with pytest.raises(Killed):
            of(Counted(store, {"asked": [], when: number}), folder).save()
        lost = tmp_path / f"lost{number}" / "result"
        lost.parent.mkdir()
        of(store, lost, 2).restore()
        assert contents(lost) in states[1:]
        # The next one saves all of it, and leaves nothing of the killed one.
        of(store, folder, 2).save()
        shutil.rmtree(lost)
        of(store, lost, 3).restore()
        assert contents(lost) == states[2]
        assert len([obj for obj in store.list() if obj.key.endswith(".json")]) <= 2


def made(folder):
    (folder / "result" / "checkpoints").mkdir(parents=True)
    return folder / "result"


def test_who_is_killed_while_it_restores_leaves_what_was_there(store, folder, monkeypatch):
    write(folder, 2)
    of(store, folder).save()
    expected = contents(folder)
    shutil.rmtree(folder)
    made(folder.parent)
    write(folder, 1)
    before = contents(folder)
    read = FolderStore.read_bytes
    count = 0

    def dies(self, key):
        nonlocal count
        count += 1
        if count == 4:
            raise Killed
        return read(self, key)

    monkeypatch.setattr(FolderStore, "read_bytes", dies)
    with pytest.raises(Killed):
        of(store, folder, 2).restore(newest_in(folder, folder.parent))
    assert contents(folder) == before
    of(store, folder, 3).restore(newest_in(folder, folder.parent))
    assert contents(folder) == expected


def test_older_ones_than_here_and_those_of_other_data_are_not_brought(store, folder):
    write(folder, 2)
    of(store, folder).save()
    write(folder, 3)
    before = contents(folder)
    assert of(store, folder, 2).restore(newest_in(folder, folder.parent)) is None
    assert of(store, folder, 2, dataset="other").restore() is None
    assert contents(folder) == before


@pytest.mark.parametrize("damage", ["flipped", "short", "gone", "snapshot"])
def test_a_damaged_one_is_found_out_and_the_one_before_is_taken(store, folder, tmp_path, damage):
    write(folder, 1)
    of(store, folder).save()
    first = contents(folder)
    chunks = {obj.key for obj in store.list()}
    write(folder, 2)
    of(store, folder).save()
    fresh = sorted({obj.key for obj in store.list()} - chunks)
    key = fresh[0] if damage == "snapshot" else fresh[-1]
    path = tmp_path / "store" / key
    body = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(body[:-1] if damage == "short" else bytes([body[0] ^ 1]) + body[1:])
    shutil.rmtree(folder)
    of(store, folder, 2).restore()
    assert contents(folder) == first
    for obj in store.list():
        if obj.key.endswith(".json"):
            (tmp_path / "store" / obj.key).write_bytes(b"{}")
    with pytest.raises(TransferCorrupt, match=r"0000000\d.json is no snapshot"):
        of(store, folder, 2).restore()
    assert contents(folder) == first


def test_a_checkpoint_that_changes_while_it_is_read_is_read_again_or_left(
    store, folder, monkeypatch
):
    write(folder, 1)
    (folder / "events.out.tfevents.1").write_bytes(b"e" * 1500)
    seen, real = [], snapshots.open_beneath

    def changing(path, root, *more):
        seen.append(path.name)
        if path.name.startswith("events") and len(seen) > 4:
            with open(path, "ab") as file:  # which grows all the time
                file.write(b"more")
        if path.name == "m-1.index" and seen.count(path.name) == 2:
            write(folder, 2)
        return real(path, root, *more)

    monkeypatch.setattr(snapshots, "open_beneath", changing)
    of(store, folder).save()
    monkeypatch.undo()
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", CHUNK)
    shutil.rmtree(folder)
    of(store, folder, 2).restore()
    came = contents(folder)
    assert came["checkpoints/checkpoint"] == b"m-2"
    assert {"checkpoints/m-2.index", "checkpoints/m-2.data-00000-of-00001"} <= came.keys()
    assert not any("m-1" in key for key in came)
    assert came["events.out.tfevents.1"].startswith(b"e" * 1500)


def test_one_that_never_holds_still_is_not_saved(store, folder, monkeypatch):
    write(folder, 1)
    real, count = snapshots.open_beneath, 0

    def changing(path, root, *more):
        nonlocal count
        count += 1
        if path.name == "checkpoint":
            path.write_text(f"m-{count}")
        return real(path, root, *more)

    monkeypatch.setattr(snapshots, "open_beneath", changing)
    assert of(store, folder).save() is None
    assert [obj.key for obj in store.list() if obj.key.endswith(".json")] == []


def test_without_a_checkpoint_nothing_is_saved(store, folder):
    (folder / "metrics.txt").write_text("0.5")
    (folder / "checkpoints" / "events.out.tfevents.1").write_text("e")
    assert of(store, folder).save() is None
    assert not (folder.parent.parent / "store").exists()


def test_links_and_what_is_half_written_is_left_out(store, folder, tmp_path):
    write(folder, 1)
    (tmp_path / "secret").write_text("of another")
    (folder / "checkpoints" / "m-9.index").symlink_to(tmp_path / "secret")
    (folder / "checkpoints" / ".m-9.keras").write_text("half")
    (folder / "checkpoints" / "m-9.index.tempstate123").write_text("half")
    (folder / "out").symlink_to(tmp_path)
    assert of(store, folder).save().files == 3


@pytest.mark.parametrize("name", ["m-2.index", "tmpfolder", "tmpk3x9"])
def test_a_checkpoint_that_may_not_be_read_is_not_left_out(store, folder, monkeypatch, name):
    """As ranks of another user leave what tempfile made."""
    write(folder, 1)
    private = folder / "checkpoints" / name
    private.mkdir() if name == "tmpfolder" else private.write_text("of its user alone")
    os.utime(private, (1e6, 1e6))
    opened, listed = os.open, os.scandir

    def refusing(work):
        def refuse(path, *words, **named):
            if os.path.basename(path) == name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return work(path, *words, **named)

        return refuse

    monkeypatch.setattr(os, "open", refusing(opened))
    monkeypatch.setattr(os, "scandir", refusing(listed))
    if name == "tmpk3x9":  # what it is nobody knows
        assert of(store, folder).save().files == 3
        return
    with pytest.raises(AccessDenied, match=f"checkpoints/{name}: only user .* may read it"):
        of(store, folder).save()
    # A try that follows may read it.
    assert newest_in(folder, folder.parent) == 1e6


def test_an_earlier_try_that_still_runs_somewhere_stops(store, folder, tmp_path):
    other = made(tmp_path / "other")
    write(folder, 1)
    old, new = of(store, folder, 1), of(store, other, 2)
    old.begin()
    old.save()
    new.begin()
    write(folder, 2)
    with pytest.raises(TryIsOver, match="try 2 of the training saves"):
        old.save()
    with pytest.raises(TryIsOver):
        old.begin()
    new.restore()
    write(other, 5)
    assert new.save().uri.endswith("/00000002.json")


def test_of_two_that_save_at_once_neither_replaces_the_other(store, folder, tmp_path, monkeypatch):
    other = made(tmp_path / "other")
    write(folder, 1)
    write(other, 2)
    put_if, began, saved = FolderStore.put_if, [], []

    def late(self, key, body, version):
        if key == "00000001.json" and not began:
            began.append(key)
            saved.append(of(store, other).save())
        return put_if(self, key, body, version)

    monkeypatch.setattr(FolderStore, "put_if", late)
    first = of(store, folder).save()
    assert (first.uri[-6:], saved[0].uri[-6:]) == ("2.json", "1.json")


def test_nothing_is_sent_once_nobody_wants_it(store, folder):
    write(folder, 1)
    saving = Snapshots(store, folder, folder.parent, {}, 1, now=lambda: 0.0, go_on=lambda: False)
    with pytest.raises(StagingError, match="nobody wants"):
        saving.save()


def test_a_key_that_leads_out_of_the_folder_is_refused(store, folder):
    write(folder, 1)
    of(store, folder).save()
    said = json.loads(store.read_bytes("00000001.json"))
    said["files"][0]["key"] = "../../out"
    store.put_bytes("00000001.json", snapshots.sealed(said))
    with pytest.raises(StagingError, match="no path inside a folder"):
        of(store, folder, 2).restore()


def test_dropped_ones_are_gone(store, folder):
    write(folder, 1)
    saving = of(store, folder)
    saving.begin()
    saving.save()
    saving.drop()
    assert store.list() == []
    assert saving.save().sent == 14

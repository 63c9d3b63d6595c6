"""Checkpoints saved in a store while a training runs, and brought back."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import struct
import zipfile
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from ddl_airflow.core.errors import AccessDenied, StagingError, TransferCorrupt
from ddl_airflow.storage import checkpoint_files, snapshots
from ddl_airflow.storage.checkpoint_files import is_to_go_on_from
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.snapshots import CheckpointsChange, Snapshots, TryIsOver
from tests.integration.disk import tiny_disk

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
    monkeypatch.setattr(snapshots, "_PAUSE_S", 0.0)


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


def opens(monkeypatch, function):
    """Has files be opened by it, to be looked at and to be read."""
    for module in (checkpoint_files, snapshots):
        monkeypatch.setattr(module, "open_beneath", function)


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
    # By which the newest is found.
    assert (folder / "checkpoints" / "m-1.index").stat().st_mtime == 1001.0


def test_what_is_brought_says_what_it_was_made_with_and_may_be_of_other_code(store, folder):
    (folder / "checkpoints" / "m-1.ckpt").write_bytes(b"1")
    told = {"made_of": {"dataset": "d", "code": "old"}, "went_on_from": []}
    saving = Snapshots(
        *(store, folder, folder.parent, {"dataset": "d"}, 1),
        now=lambda: 17.0,
        begun_with=lambda: told,
    )
    saving.save()
    same = of(store, folder, 2)
    assert same.restore() is None and same.brought == {}  # what is there is here
    shutil.rmtree(folder)
    lost = of(store, folder, 2)
    assert lost.restore() is not None and lost.brought == told


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
        of(store, folder, 2).restore()
    assert contents(folder) == before
    of(store, folder, 3).restore()
    assert contents(folder) == expected


@pytest.mark.parametrize("number", range(6))
def test_who_is_killed_while_it_looks_at_what_came_goes_on_from_a_whole_one(
    store, folder, tmp_path, monkeypatch, number
):
    aside, saving, at = tmp_path / "damaged", of(store, folder), count()
    for second, body in enumerate((b"whole", b"torn!")):
        keras(folder, body, 1000 + second)
        (folder / "checkpoints" / "history.csv").write_bytes(body)
        saving.save()
    torn(aside)(folder)

    def mortal(work):
        def step(*words, **named):
            if next(at) == number:
                raise Killed
            return work(*words, **named)

        return step

    with monkeypatch.context() as patch:
        # Nothing is cleaned up after SIGKILL.
        patch.setattr(snapshots.shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(Path, "rename", mortal(Path.rename))
        look = mortal(torn(aside))
        with pytest.raises(Killed):
            of(store, folder, 2).restore(lambda fresh: mortal(look)(fresh), aside)
            raise Killed  # after all of it
    of(store, folder, 3).restore(torn(aside), aside)
    assert (folder / "checkpoints" / "model.keras").read_bytes() == b"whole"


def test_a_full_disk_ends_a_copy_and_leaves_none(store, folder, tmp_path, monkeypatch):
    with tiny_disk(tmp_path / "small", 64 * 1024) as disk:
        shutil.move(folder.parent, disk)
        folder = disk / "work" / "result"
        model = folder / "checkpoints" / "model.h5"

        rewrites = []

        def rewrite():
            if not rewrites:
                model.write_bytes(os.urandom(40 * 1024))

        rewrite()
        saving = of(Busy(tmp_path / "store", rewrite), folder)
        with pytest.raises(CheckpointsChange):  # there is no room, and none is taken
            saving.save()
        free = shutil.disk_usage(disk)
        monkeypatch.setattr(snapshots.shutil, "disk_usage", lambda _: free._replace(free=2**30))
        with pytest.raises(CheckpointsChange):  # a quota is met first: it is sent as it is
            saving.save()
        rewrites.append("no more")
        saving.save()
        monkeypatch.undo()
        assert shutil.disk_usage(disk).free == free.free


def test_older_ones_than_here_and_those_of_other_data_are_not_brought(store, folder):
    write(folder, 2)
    of(store, folder).save()
    write(folder, 3)
    before = contents(folder)
    assert of(store, folder, 2).restore() is None
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

    opens(monkeypatch, changing)
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

    opens(monkeypatch, changing)
    with pytest.raises(CheckpointsChange, match=f"{folder}/checkpoints/checkpoint: .* changed"):
        of(store, folder).save()
    assert not (folder.parent.parent / "store").exists()  # nor anything sent


class Busy(FolderStore):
    """One that is slow: ``meanwhile`` is called whenever something is sent."""

    def __init__(self, root, meanwhile):
        super().__init__(root)
        self._meanwhile = meanwhile

    def at(self, prefix):
        return Busy(super().at(prefix)._root, self._meanwhile)

    def put_bytes(self, key, body):
        self._meanwhile()
        return super().put_bytes(key, body)


def needed_and_there(store):
    keys = [obj.key for obj in store.list()]
    said = [json.loads(store.read_bytes(key)) for key in keys if key.startswith("0")]
    needed = {chunk[0] for one in said for file in one["files"] for chunk in file["chunks"]}
    return needed, {key.removeprefix("chunks/") for key in keys if key.startswith("chunks/")}


def test_checkpoints_that_are_written_faster_than_they_upload_are_saved(store, folder, tmp_path):
    steps = count(1)
    write(folder, next(steps))
    saving = of(Busy(tmp_path / "store", lambda: write(folder, next(steps))), folder)
    for save in range(1, 5):
        assert saving.save().uri.endswith(f"/0000000{save}.json")
        needed, there = needed_and_there(store)
        assert there == needed
    shutil.rmtree(folder)
    of(store, folder, 2).restore()
    came = contents(folder)
    name = came["checkpoints/checkpoint"].decode()
    assert came.keys() == {
        f"checkpoints/{one}"
        for one in ("checkpoint", f"{name}.index", f"{name}.data-00000-of-00001")
    }
    assert came[f"checkpoints/{name}.index"] == b"index %d" % int(name[2:])


@pytest.mark.parametrize("room", [True, False])
def test_one_that_is_written_in_place_is_copied_before_it_is_sent(
    store, folder, tmp_path, monkeypatch, room
):
    model = folder / "checkpoints" / "model.h5"
    steps = count(1)

    def rewrite():
        step = next(steps)
        model.write_bytes(bytes([step % 256]) * 3 * CHUNK + random.Random(step).randbytes(CHUNK))
        os.utime(model, (1000 + step, 1000 + step))

    rewrite()
    saving = of(Busy(tmp_path / "store", rewrite), folder)
    if not room:  # a copy would fill the disk, on which ranks write
        free = snapshots.shutil.disk_usage(tmp_path)._replace(free=7 * CHUNK)
        monkeypatch.setattr(snapshots.shutil, "disk_usage", lambda _: free)
        for _ in range(4):
            with pytest.raises(CheckpointsChange, match=r"model\.h5: .* changed .* under another"):
                saving.save()
            assert needed_and_there(store) == (set(), set())
        return
    saving.save()
    needed, there = needed_and_there(store)
    assert there == needed
    shutil.rmtree(folder)
    of(store, folder, 2).restore()
    body = model.read_bytes()
    assert len(body) == 4 * CHUNK
    assert body == bytes(body[:1]) * 3 * CHUNK + random.Random(body[0]).randbytes(CHUNK)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["result"]


def test_what_is_sent_of_snapshots_that_come_to_nothing_does_not_pile_up(
    store, folder, monkeypatch
):
    def refuse(*_):
        raise AccessDenied("AccessDenied. Check the keys.")

    saving = of(store, folder)
    write(folder, 1)
    saving.save()
    monkeypatch.setattr(FolderStore, "put_if", refuse)
    for step in range(2, 9):
        write(folder, step)
        with pytest.raises(AccessDenied):
            saving.save()
        needed, there = needed_and_there(store)
        # And of what is here nothing is sent twice.
        assert needed < there and len(there - needed) <= 4


@pytest.mark.parametrize("left", [0, 20, 700])
@pytest.mark.parametrize("kind", ["keras", "h5", "latest hdf5"])
def test_one_that_is_half_written_takes_the_place_of_none(store, folder, left, kind):
    model = folder / "checkpoints" / f"model.{kind.split()[-1]}"
    if kind == "keras":
        with zipfile.ZipFile(model, "w") as archive:
            archive.writestr("model.weights.h5", random.Random(0).randbytes(3 * CHUNK))
    else:
        h5py = pytest.importorskip("h5py")
        with h5py.File(model, "w", libver="latest" if kind == "latest hdf5" else None) as file:
            file["weights"] = np.zeros(3 * CHUNK, "u1")
    expected = model.read_bytes()
    saving = of(store, folder)
    assert saving.save().half_written == ()
    os.truncate(model, left)
    for step in range(4):
        (folder / "metrics.txt").write_text(f"{step}")
        assert saving.save().half_written == (f"checkpoints/{model.name}",)
    keys = [obj.key for obj in store.list() if obj.key.startswith("0")]
    assert keys == ["00000001.json", "00000004.json", "00000005.json"]
    shutil.rmtree(folder)

    def leave_whole(fresh):
        (fresh / "checkpoints" / model.name).replace(aside / model.name)

    aside = folder.parent / "damaged"
    aside.mkdir()
    looks = iter([leave_whole, leave_whole, lambda _: None])
    restored = of(store, folder, 2).restore(lambda fresh: next(looks)(fresh), aside)
    assert restored.uri.endswith("/00000001.json") and model.read_bytes() == expected
    # One that is whole takes it.
    saving = of(store, folder, 3)
    for step in range(3):
        os.utime(model, (2e9 + step, 2e9 + step))
        saving.save()
    assert "00000001.json" not in {obj.key for obj in store.list()}


def torn(aside):
    """What moves checkpoints that begin so away, as ddl_ops.resume does damaged ones."""

    def leave_whole(folder):
        for path in folder.rglob("*.keras"):
            if path.read_bytes().startswith(b"torn"):
                place = aside / path.relative_to(folder)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)

    return leave_whole


def keras(folder, body, time_s, name="model.keras"):
    path = folder / "checkpoints" / name
    path.write_bytes(body)
    os.utime(path, (time_s, time_s))


def damaged_beside_another(store, folder, aside):
    """The newest was damaged here, is whole in the store, and another is newer than that."""
    keras(folder, b"whole", 1000)
    of(store, folder).save()
    keras(folder, b"torn", 2000)
    keras(folder, b"best", 1999, name="best.keras")
    torn(aside)(folder)


def test_a_snapshot_of_a_damaged_checkpoint_gives_way_to_the_one_before(store, folder, tmp_path):
    aside = tmp_path / "damaged"
    saving = of(store, folder)
    for second, body in enumerate((b"first", b"whole", b"torn!")):
        keras(folder, body, 1000 + second)
        (folder / "checkpoints" / "history.csv").write_bytes(body)
        saving.save()
    shutil.rmtree(folder)
    again = of(store, folder, 2)
    assert again.restore(torn(aside), aside).uri.endswith("/00000002.json")
    assert (folder / "checkpoints" / "model.keras").read_bytes() == b"whole"
    # What a try has gone on from stays, whatever it saves; also where it is not brought anew.
    for try_number in (2, 3):
        for second in range(3):
            keras(folder, b"torn %d" % second, 1010 + second)
            again.save()
        assert "00000002.json" in {obj.key for obj in store.list()}
        torn(aside)(folder)
        keras(folder, b"another", 1020, name="best.keras")
        again = of(store, folder, try_number + 1)
        again.restore(torn(aside), aside)
        assert (folder / "checkpoints" / "model.keras").read_bytes() == b"whole"
    # Until a later one has been.
    for second in range(4):
        keras(folder, b"whole %d" % second, 1030 + second)
        again.save()
    last = of(store, folder, 9)
    assert last.restore(torn(aside), aside) is None
    for second in range(3):
        keras(folder, b"torn %d" % second, 1040 + second)
        last.save()
    assert "00000002.json" not in {obj.key for obj in store.list()}
    shutil.rmtree(folder)
    of(store, folder, 10).restore(torn(aside), aside)
    assert (folder / "checkpoints" / "model.keras").read_bytes() == b"whole 3"


def test_a_damaged_checkpoint_here_does_not_hide_a_whole_one_in_the_store(store, folder, tmp_path):
    """Whatever else is newer here, and also if who moved it away was killed then."""
    aside = tmp_path / "damaged"
    damaged_beside_another(store, folder, aside)
    assert of(store, folder, 2).restore(torn(aside), aside) is not None
    assert (folder / "checkpoints" / "model.keras").read_bytes() == b"whole"
    # One that is whole again, and newer, is gone on from.
    keras(folder, b"newer", 3000)
    assert of(store, folder, 3).restore(torn(aside), aside) is None


@pytest.mark.parametrize(
    ("where", "counts"),
    [
        ("", True),
        ("checkpoints", True),
        ("2/checkpoints", True),  # where an earlier one of its name had been moved
        ("experiment", False),  # of EXPERIMENT_DIR
        ("result-1/checkpoints", False),  # kept, and not damaged
    ],
)
def test_which_of_those_put_aside_were_damaged_here(store, folder, tmp_path, where, counts):
    aside = tmp_path / "damaged"
    damaged_beside_another(store, folder, aside)
    (aside / where).mkdir(parents=True, exist_ok=True)
    (aside / "checkpoints" / "model.keras").replace(aside / where / "model.keras")
    assert (of(store, folder, 2).restore(torn(aside), aside) is not None) == counts


def test_one_that_a_script_removed_takes_no_newer_step_back(store, folder, tmp_path):
    """As one that is written on SIGTERM, and removed once it was gone on from."""
    aside = tmp_path / "damaged"
    keras(folder, b"whole", 1000, name="interrupted.keras")
    of(store, folder).save()
    keras(folder, b"torn", 9001, name="interrupted.keras")
    keras(folder, b"step 90", 9000, name="model-90.keras")
    torn(aside)(folder)
    for try_number in (2, 3):
        assert of(store, folder, try_number).restore(torn(aside), aside) is None
    assert [path.name for path in folder.glob("checkpoints/*")] == ["model-90.keras"]


def test_newer_ones_that_give_way_to_an_older_snapshot_are_kept(store, folder, tmp_path):
    aside = tmp_path / "damaged"
    damaged_beside_another(store, folder, aside)
    kept = of(store, folder, 2).restore(torn(aside), aside).kept
    assert kept == aside / "result-2"
    assert (kept / "checkpoints" / "best.keras").read_bytes() == b"best"
    # Nothing is, that is older than what came.
    keras(folder, b"newer", 3000)
    of(store, folder, 2).save()
    keras(folder, b"older", 2500)
    assert of(store, folder, 3).restore(torn(aside), aside).kept is None
    assert sorted(path.name for path in aside.iterdir()) == ["checkpoints", "result-2"]


def test_a_file_that_is_whole_nowhere_takes_nothing_back(store, folder, tmp_path):
    aside = tmp_path / "damaged"
    keras(folder, b"torn", 1000, name="odd.keras")
    keras(folder, b"old", 1000)
    of(store, folder).save()
    keras(folder, b"new", 2000)
    torn(aside)(folder)
    assert of(store, folder, 2).restore(torn(aside), aside) is None
    assert (folder / "checkpoints" / "model.keras").read_bytes() == b"new"
    assert sorted(path.name for path in folder.parent.iterdir()) == ["result"]


class Stale:
    """A file of NFS that another host removes: a call of that name fails once."""

    def __init__(self, file, name, told):
        self._file, self._name, self._told = file, name, told

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        if name == self._name and not self._told:
            self._told.append(name)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return getattr(self._file, name)


@pytest.mark.parametrize("name", ["seek", "read", "fileno"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_that_another_host_removes_has_changed(store, folder, monkeypatch, name, in_place):
    keras(folder, b"whole", 1000)
    saving, told, opened = of(store, folder), [], Snapshots._open
    if in_place:
        saving._in_place.add("checkpoints/model.keras")
    monkeypatch.setattr(Snapshots, "_open", lambda *one: Stale(opened(*one), name, told))
    assert saving.save().files == 1
    assert told == ([] if in_place and name != "read" else [name])  # of a copy, nothing else is


def test_an_archive_with_an_odd_table_looks_half_written(store, folder):
    with zipfile.ZipFile(folder / "checkpoints" / "model.keras", "w") as archive:
        archive.writestr("model.weights.h5", b"w")
    body = (folder / "checkpoints" / "model.keras").read_bytes()
    locator = struct.pack("<4sLQL", b"PK\6\7", 5, 0, 6)  # of an archive on six disks
    keras(folder, body[:-22] + locator + body[-22:], 1000)
    assert of(store, folder).save().half_written == ("checkpoints/model.keras",)


def test_what_an_interrupted_save_has_sent_is_not_sent_again(store, folder, monkeypatch):
    """Nor does it pile up, while the store breaks off all the time."""
    write(folder, 1)
    put, puts = FolderStore.put_bytes, []

    def hiccup(self, key, body):
        puts.append(key)
        if len(puts) % 5 == 0:
            raise StagingError("503 Slow Down.")
        return put(self, key, body)

    monkeypatch.setattr(FolderStore, "put_bytes", hiccup)
    saving = of(store, folder)
    for _ in range(3):
        with pytest.raises(StagingError, match="503"):
            saving.save()
    assert saving.save().sent == 14 - 3 * 4
    model = folder / "checkpoints" / "m-1.data-00000-of-00001"
    for step in range(9):
        model.write_bytes(random.Random(step + 7).randbytes(12 * CHUNK))
        puts.clear()
        with pytest.raises(StagingError, match="503"):
            saving.save()
        needed, there = needed_and_there(store)
        assert len(there - needed) <= 2 * 14


def test_a_snapshot_that_came_damaged_once_loses_no_chunk(store, folder, monkeypatch):
    saving = of(store, folder)
    for step in (1, 2, 3):
        write(folder, step)
        saving.save()
    expected = contents(folder)
    read, told = FolderStore.read_version, []

    def once(self, key):
        found = read(self, key)
        if key == "00000003.json" and not told:
            told.append(key)
            return b"{}", found[1]
        return found

    write(folder, 4)
    monkeypatch.setattr(FolderStore, "read_version", once)
    saving.save()
    (store._root / "00000004.json").unlink()
    shutil.rmtree(folder)
    assert told and of(store, folder, 2).restore().uri.endswith("/00000003.json")
    assert contents(folder) == expected


def test_one_that_stays_damaged_lets_nothing_pile_up(store, folder):
    write(folder, 1)
    of(store, folder).save()
    saving = of(store, folder, 2)
    saving.restore()
    (store._root / "00000001.json").write_bytes(b"{}")
    for step in range(2, 7):
        write(folder, step)
        saving.save()
    names = [obj.key for obj in store.list() if obj.key.startswith("0")]
    assert names[-2:] == ["00000005.json", "00000006.json"] and len(names) <= 3


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
    assert is_to_go_on_from(folder, folder.parent, folder.parent / "damaged")


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


def test_dropped_ones_are_gone(store, folder, tmp_path):
    saving = of(store, folder)
    saving.begin()
    for step in (1, 2, 3):
        write(folder, step)
        saving.save()
    saving.drop()
    assert not any((tmp_path / "store").rglob("*"))
    assert saving.save().sent == 14

"""Files of elastic commits: whole, of this training and of this user, or passed over."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from ddl_ops import rank

STAND_IN = Path(rank.__file__).parent / "stand_in"


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch):
    """The module, which only ranks find."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    before = set(sys.modules)
    from horovod.common import commits as module

    yield module
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "horovod":
            del sys.modules[name]


@pytest.fixture
def written(commits, tmp_path: Path):
    """A folder with three commits of state 1, the first of which is gone; and one of state 2."""
    of = commits.Commits(tmp_path / "ours", 1, "t")
    for number in (1, 2, 3):
        values = [np.full((2, 3), number, np.float16), np.int64(number), np.zeros((0, 4))]
        texts = np.array([b"a", b"bcd"], object)
        attributes = {"epoch": number, "seen": [(1, "x")]}
        of.write(number, commits.Commit(10 * number, attributes, [*values, texts]))
    commits.Commits(tmp_path / "ours", 2, "t").write(9, commits.Commit(1, {}, []))
    return tmp_path / "ours"


def newest_of(commits, folder: Path, training: str = "t"):
    of = commits.Commits(folder, 1, training)
    return of.newest(), of.number


def test_the_last_two_are_kept_and_read(commits, written: Path):
    names = sorted(path.name for path in written.iterdir())
    assert names == ["horovod-1-2.commit", "horovod-1-3.commit", "horovod-2-9.commit"]
    (found, number) = newest_of(commits, written)
    assert number == 3
    assert (found.checks, found.attributes) == (30, {"epoch": 3, "seen": [(1, "x")]})
    whole, scalar, empty, texts = found.arrays
    assert whole.dtype == np.float16 and np.array_equal(whole, np.full((2, 3), 3))
    assert scalar.shape == () and scalar == 3 and empty.shape == (0, 4)
    assert texts.tolist() == [b"a", b"bcd"]


@pytest.mark.parametrize("place", ["begin", "middle", "end", "cut", "empty"])
def test_a_damaged_one_is_passed_over_and_its_number_not_given_again(
    commits, written: Path, place: str, capfd
):
    path = written / "horovod-1-3.commit"
    data = bytearray(path.read_bytes())
    if place in ("cut", "empty"):
        path.write_bytes(data[: -1 if place == "cut" else 0])
    else:
        data[{"begin": 0, "middle": len(data) // 2, "end": -1}[place]] ^= 1
        path.write_bytes(data)
    (found, number) = newest_of(commits, written)
    assert found.attributes["epoch"] == 2 and number == 3
    said = capfd.readouterr().err
    assert f"{path} is passed over: it is damaged or half written\n" in said
    assert "goes on from horovod-1-2.commit\n" in said


def test_what_was_not_finished_is_removed(commits, written: Path):
    left = written / ".horovod-1-4.commit.partial"
    left.write_bytes(b"x")
    newest_of(commits, written)
    assert not left.exists()


def test_one_that_others_can_make_is_not_unpickled(commits, written: Path, capfd):
    newest, before = written / "horovod-1-3.commit", written / "horovod-1-2.commit"
    newest.chmod(0o660)
    before.rename(written / "elsewhere")
    before.symlink_to(written / "elsewhere")
    assert newest_of(commits, written) == (None, 3)
    said = capfd.readouterr().err
    assert "others than its owner may write it" in said and "it is a link" in said


def test_one_of_another_user_is_not_unpickled(commits, written: Path, monkeypatch, capfd):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for path in written.iterdir():
        os.chown(path, 12345, -1)
    assert newest_of(commits, written) == (None, 3)
    assert "it belongs to user 12345" in capfd.readouterr().err
    # A file server that gives all files one owner gives that one the folder, too.
    os.chown(written, 12345, -1)
    assert newest_of(commits, written)[0].attributes["epoch"] == 3


def test_one_of_another_training_is_passed_over(commits, written: Path):
    assert newest_of(commits, written, "another") == (None, 3)


def test_a_full_disk_fails_and_leaves_what_was_there(commits, written: Path, monkeypatch):
    def full(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commits.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        commits.Commits(written, 1, "t").write(4, commits.Commit(1, {}, [np.zeros(9)]))
    monkeypatch.undo()
    assert sorted(path.name for path in written.iterdir()) == [
        "horovod-1-2.commit",
        "horovod-1-3.commit",
        "horovod-2-9.commit",
    ]


def test_attributes_that_cannot_be_made_again_name_the_file(commits, tmp_path: Path, monkeypatch):
    of = commits.Commits(tmp_path, 1, "t")
    of.write(1, commits.Commit(1, {"epoch": 1}, []))

    def missing(_data):
        raise ModuleNotFoundError("No module named 'gone'")

    monkeypatch.setattr(commits, "unpickled", missing)
    with pytest.raises(RuntimeError, match=r"horovod-1-1\.commit.*No module named 'gone'"):
        of.newest()


def test_who_commits_too_often_is_told_once(commits, tmp_path: Path, monkeypatch, capfd):
    seconds = iter(range(0, 1000, 30))  # of each look at the clock, so half is spent writing
    monkeypatch.setattr(commits.time, "monotonic", lambda: next(seconds))
    of = commits.Commits(tmp_path, 1, "t")
    for number in range(1, 5):
        of.write(number, commits.Commit(1, {}, []))
    said = capfd.readouterr().err
    assert said == (
        "ddl: rank 0: hvd.elastic: commits have taken 30 s of 90 s. Commit less often: a start "
        "after a loss goes on from the last one.\n"
    )

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


def place_of(commits, **other: object):
    """Where a script trains a state; with other facts another one."""
    facts = {"script": "s", "function": "train", "file": "train.py", "line": 7, "times": 1}
    facts |= {"names": ("epoch",), "source": "x", "text": "train(a)", "folders": "f", "ordinal": 1}
    return commits.Place(**facts | other)


def commits_of(commits, folder: Path, training: str = "t", **other: object):
    return commits.Commits(folder, place_of(commits, **other), training)


@pytest.fixture
def path_of(commits, tmp_path: Path):
    """path_of(number): the file of a commit of the state in `written`."""
    state = place_of(commits).state("t")
    return lambda number, state=state: tmp_path / "ours" / f"horovod-{state}-{number}.commit"


@pytest.fixture
def written(commits, tmp_path: Path):
    """A folder with three commits of a state, the first of which is gone; and one of another."""
    of = commits_of(commits, tmp_path / "ours")
    for number in (1, 2, 3):
        values = [np.full((2, 3), number, np.float16), np.int64(number), np.zeros((0, 4))]
        texts = np.array([b"a", b"bcd"], object)
        attributes = {"epoch": number, "seen": [(1, "x")]}
        of.write(number, commits.Commit(10 * number, attributes, [*values, texts]))
    commits_of(commits, tmp_path / "ours", line=9).write(9, commits.Commit(1, {}, []))
    return tmp_path / "ours"


def newest_of(commits, folder: Path, training: str = "t"):
    of = commits_of(commits, folder, training)
    return of.newest(), of.number


def test_the_last_two_are_kept_and_read(commits, written: Path, path_of):
    other = place_of(commits, line=9).state("t")
    assert {*written.iterdir()} == {path_of(2), path_of(3), path_of(9, other)}
    (found, number) = newest_of(commits, written)
    assert number == 3
    assert (found.checks, found.attributes) == (30, {"epoch": 3, "seen": [(1, "x")]})
    whole, scalar, empty, texts = found.arrays
    assert whole.dtype == np.float16 and np.array_equal(whole, np.full((2, 3), 3))
    assert scalar.shape == () and scalar == 3 and empty.shape == (0, 4)
    assert texts.tolist() == [b"a", b"bcd"]


@pytest.mark.parametrize("place", ["begin", "middle", "end", "cut", "empty"])
def test_a_damaged_one_is_passed_over_and_its_number_not_given_again(
    commits, written: Path, path_of, place: str, capfd
):
    path = path_of(3)
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
    assert f"goes on from {path_of(2).name}\n" in said


def test_what_was_not_finished_is_removed(commits, written: Path, path_of):
    left = written / f".{path_of(4).name}.partial"
    left.write_bytes(b"x")
    newest_of(commits, written)
    assert not left.exists()


def test_one_that_others_can_make_is_not_unpickled(commits, written: Path, path_of, capfd):
    path_of(3).chmod(0o660)
    (found, number) = newest_of(commits, written)
    assert found.attributes["epoch"] == 2 and number == 3
    said = capfd.readouterr().err
    assert f"{path_of(3)} is passed over: others than its owner may write it (mode 0660)" in said
    path_of(2).rename(written / "elsewhere")
    path_of(2).symlink_to(written / "elsewhere")
    with pytest.raises(RuntimeError, match="others than its owner may write it"):
        newest_of(commits, written)
    assert "it is a link" in capfd.readouterr().err


def test_where_all_are_refused_nothing_begins_and_nothing_is_removed(
    commits, written: Path, path_of
):
    for path in written.iterdir():
        path.chmod(0o777)
    cure = rf"{path_of(3)} is not gone on from: .*mode 0777.*chmod go-w {path_of(3)}"
    with pytest.raises(RuntimeError, match=cure):
        newest_of(commits, written)
    for number in (2, 3):
        path_of(number).chmod(0o640)
    assert newest_of(commits, written)[0].attributes["epoch"] == 3


def test_what_was_passed_over_stays(commits, written: Path, path_of):
    path_of(3).chmod(0o660)
    of = commits_of(commits, written)
    of.newest()
    for number in (4, 5, 6):
        of.write(number, commits.Commit(1, {}, []))
    left = [number for number in range(7) if path_of(number).exists()]
    assert left == [3, 5, 6]


def test_a_file_system_that_gives_all_files_a_mode_is_told_at_the_first_commit(
    commits, written: Path, path_of, monkeypatch, capfd
):
    monkeypatch.setattr(commits.stat, "S_IWOTH", 0o400)
    of = commits_of(commits, written)
    for number in (4, 5):
        of.write(number, commits.Commit(1, {}, []))
    said = capfd.readouterr().err
    assert said.count("no later start") == 1
    assert (
        f"no later start will go on from {path_of(4)}: others than its owner may write it" in said
    )


def test_one_of_another_user_is_not_unpickled(commits, written: Path):
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    for path in written.iterdir():
        os.chown(path, 12345, -1)
    with pytest.raises(RuntimeError, match=r"it belongs to user 12345.*chown 0 "):
        newest_of(commits, written)
    # A file server that gives all files one owner gives that one the folder, too.
    os.chown(written, 12345, -1)
    assert newest_of(commits, written)[0].attributes["epoch"] == 3


def test_one_of_another_training_is_left_alone(commits, written: Path, path_of, capfd):
    of = commits_of(commits, written, "another")
    assert (of.newest(), of.number) == (None, 0)
    for number in range(1, 4):
        of.write(number, commits.Commit(1, {}, []))
    assert path_of(2).exists() and path_of(3).exists()
    assert (
        f"train (train.py:7) begins anew: {written} has commits of others: train (train.py:7) of "
        "training 't', train (train.py:9) of training 't'\n"
    ) in capfd.readouterr().err


@pytest.mark.parametrize(
    "other",
    [
        {"script": "with other arguments"},
        {"function": "finetune"},
        {"file": "finetune.py"},
        {"line": 8},
        {"times": 2},
        {"names": ("batch", "epoch")},
        {"source": "of another script of that name", "folders": "g"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_one_of_another_place_is_left_alone(commits, written: Path, path_of, other, capfd):
    of = commits_of(commits, written, **other)
    assert (of.newest(), of.number) == (None, 0)
    assert "begins anew" in capfd.readouterr().err
    of.write(1, commits.Commit(1, {}, []))
    assert path_of(2).exists() and path_of(3).exists()
    capfd.readouterr()
    known = {place_of(commits).state("t"), place_of(commits, line=9).state("t"), of.state}
    assert commits_of(commits, written, times=3).newest(known) is None
    assert capfd.readouterr().err == ""  # of what this process has begun nobody is told


def test_a_script_that_was_mended_goes_on_where_one_place_is_meant(
    commits, written: Path, path_of, capfd
):
    mended = {"source": "y", "line": 8, "names": ("batch", "epoch")}
    of = commits_of(commits, written, **mended)
    other = path_of(9, place_of(commits, line=9).state("t"))
    names = ", ".join(sorted((path_of(3).name, other.name)))  # of line 7, or of line 9
    with pytest.raises(RuntimeError, match=rf"train \(train.py:8\) was mended.* from: {names}\. M"):
        of.newest()
    other.unlink()
    assert of.newest().attributes["epoch"] == 3 and of.number == 3
    assert not path_of(3).exists()  # so that no other place goes on from it
    again = commits_of(commits, written, **mended | {"source": "z", "line": 12})
    assert again.newest().attributes["epoch"] == 3


def test_a_script_that_is_the_same_elsewhere_goes_on(commits, written: Path):
    assert commits_of(commits, written, folders="g").newest().attributes["epoch"] == 3


@pytest.mark.parametrize("text", ["", "train("], ids=["calls-differ", "calls-alike"])
@pytest.mark.parametrize("apart", [1, 2])
def test_no_states_of_a_script_that_was_mended_are_swapped(
    commits, tmp_path: Path, apart: int, text: str
):
    """One line is added above both: of two in a row one is where the other was."""

    def of(number: int, source: str, above: int):
        facts = {"source": source, "line": above + apart * number, "ordinal": number}
        return commits_of(commits, tmp_path, text=text or f"train({number})", **facts)

    for number in (1, 2):
        of(number, "x", 10).write(number, commits.Commit(1, {"epoch": number}, []))
    for source, above in (("y", 11), ("z", 12), ("x", 10)):  # at last as it was
        known: set[str] = set()
        for number in (1, 2):
            one = of(number, source, above)
            assert one.newest(known).attributes["epoch"] == number
            known.add(one.state)


def test_a_state_that_is_left_out_of_a_mended_script_is_not_the_next_one(commits, tmp_path: Path):
    for number in (1, 2):
        facts = {"line": 10 + number, "ordinal": number, "text": f"train({number})"}
        of = commits_of(commits, tmp_path, **facts)
        of.write(number, commits.Commit(1, {"epoch": number}, []))
    second = commits_of(commits, tmp_path, source="y", line=11, text="train(2)")
    assert second.newest().attributes["epoch"] == 2


def test_a_state_that_is_new_in_a_mended_script_is_not_the_next_one(commits, tmp_path: Path, capfd):
    of = commits_of(commits, tmp_path, text="train(1)")
    of.write(1, commits.Commit(1, {"epoch": 1}, []))
    mended = {"source": "y", "lines": frozenset({"train(0)", "train(1)"})}
    new = commits_of(commits, tmp_path, **mended, text="train(0)")
    assert new.newest() is None and "begins anew" in capfd.readouterr().err
    old = commits_of(commits, tmp_path, **mended, line=8, text="train(1)", ordinal=2)
    assert old.newest({new.state}).attributes["epoch"] == 1
    changed = {"source": "z", "lines": frozenset({"train(2)"}), "text": "train(2)"}
    assert commits_of(commits, tmp_path, **changed).newest().attributes["epoch"] == 1


def test_what_was_not_finished_of_a_state_that_is_taken_over_is_removed(
    commits, written: Path, path_of
):
    left = written / f".{path_of(4).name}.partial"
    left.write_bytes(b"x")
    path_of(9, place_of(commits, line=9).state("t")).unlink()
    assert commits_of(commits, written, source="y").newest() is not None
    assert not left.exists()


def test_those_of_an_earlier_release_are_gone_on_from_by_number(
    commits, written: Path, path_of, monkeypatch
):
    for path in written.iterdir():
        path.unlink()
    monkeypatch.setattr(commits.json, "dumps", _without_place(commits.json.dumps))
    for ordinal in (1, 2):
        of = commits_of(commits, written)
        of.state = str(ordinal)
        of.write(ordinal + 5, commits.Commit(1, {"epoch": ordinal}, []))
    monkeypatch.undo()
    second = commits_of(commits, written, ordinal=2, line=9)
    assert second.newest().attributes["epoch"] == 2 and second.number == 7
    first = commits_of(commits, written)
    assert first.newest().attributes["epoch"] == 1 and first.number == 6
    third = commits_of(commits, written, script="with other arguments")
    assert third.newest() is None


def _without_place(dumps):
    def dumped(value):
        if isinstance(value, dict):
            value = {name: one for name, one in value.items() if name != "place"}
        return dumps(value)

    return dumped


def test_a_full_disk_fails_and_leaves_what_was_there(commits, written: Path, monkeypatch):
    before = {*written.iterdir()}

    def full(_file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commits.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        commits_of(commits, written).write(4, commits.Commit(1, {}, [np.zeros(9)]))
    monkeypatch.undo()
    assert {*written.iterdir()} == before


def test_attributes_that_cannot_be_made_again_name_the_file(commits, tmp_path: Path, monkeypatch):
    of = commits_of(commits, tmp_path)
    of.write(1, commits.Commit(1, {"epoch": 1}, []))

    def missing(_data):
        raise ModuleNotFoundError("No module named 'gone'")

    monkeypatch.setattr(commits, "unpickled", missing)
    with pytest.raises(RuntimeError, match=r"horovod-\w+-1\.commit.*No module named 'gone'"):
        of.newest()


def test_who_commits_too_often_is_told_once(commits, tmp_path: Path, monkeypatch, capfd):
    seconds = iter(range(0, 1000, 30))  # of each look at the clock, so half is spent writing
    monkeypatch.setattr(commits.time, "monotonic", lambda: next(seconds))
    of = commits_of(commits, tmp_path)
    for number in range(1, 5):
        of.write(number, commits.Commit(1, {}, []))
    said = capfd.readouterr().err
    assert said == (
        "ddl: rank 0: hvd.elastic: commits have taken 30 s of 90 s. Commit less often: a start "
        "after a loss goes on from the last one.\n"
    )

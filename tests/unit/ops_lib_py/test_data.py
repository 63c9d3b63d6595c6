"""Files of $DATA_DIR, as a rank reads them while they come and after that."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ddl_ops import data
from ddl_ops.environment import Placement

PYTHON = Path(__file__).resolve().parents[3] / "ops_lib" / "python"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    monkeypatch.setenv("DATA_DIR", str(made))
    monkeypatch.delenv("DDL_RECORD_DIR", raising=False)
    return made


def grows(folder: Path, names: list[str]) -> None:
    """As the step begins: nothing is there yet."""
    lines = "".join(f"{json.dumps(name)}\n" for name in names)
    (folder / ".ddl-listing").write_text(lines, "utf-8")


def come(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)


def named(folder: Path, paths) -> list[str]:
    return [Path(path).relative_to(folder).as_posix() for path in paths]


def test_a_folder_that_is_whole_is_read_in_the_order_of_its_listing(folder: Path) -> None:
    names = ["B", "a-1", "a.b", "a/b", "aa", "ü"]
    come(folder, *names, ".complete")
    assert named(folder, data.files()) == names
    assert named(folder, data.files("a*")) == ["a-1", "a.b", "a/b", "aa"]
    assert named(folder, data.files("a/*")) == ["a/b"]
    assert named(folder, data.files()) == names  # and again
    with pytest.raises(FileNotFoundError, match=r"data has no file with a name like '\*\.csv'"):
        list(data.files("*.csv"))


def test_folders_that_are_linked_are_read_too(folder: Path) -> None:
    come(folder, "day1/a", "day1/b")
    come(folder.parent, "elsewhere/c")
    (folder / "day2").symlink_to("../elsewhere")
    (folder / "same").symlink_to("day1")
    names = ["day1/a", "day1/b", "day2/c", "same/a", "same/b"]
    assert named(folder, data.files()) == names
    (folder / "day1" / "round").symlink_to("..")
    with pytest.raises(data.StagingFailed, match="day1/round links to a folder above itself"):
        list(data.files())


def test_each_file_comes_as_soon_as_it_is_there(folder: Path) -> None:
    names = ["line\nfeed", "one", "sub/two"]
    grows(folder, names)
    come(folder, names[0])
    reading = data.files()
    assert named(folder, [next(reading)]) == names[:1]
    timer = threading.Timer(0.3, come, (folder, *names[1:]))
    timer.start()
    assert not (folder / "one").exists()
    assert named(folder, reading) == names[1:]
    timer.join()


def test_the_order_is_the_listings_whatever_is_there_first(folder: Path) -> None:
    grows(folder, ["a", "b", "c"])
    come(folder, "c", "a")
    reading = data.files()
    assert named(folder, [next(reading)]) == ["a"]
    threading.Timer(0.2, come, (folder, "b")).start()
    assert named(folder, reading) == ["b", "c"]


def test_what_never_comes_is_named_with_its_cause(folder: Path) -> None:
    grows(folder, ["a", "b"])
    come(folder, "a")
    (folder / ".ddl-failed").write_text("AccessDenied: s3://some/b at http://there: expired")
    reading = data.files()
    assert named(folder, [next(reading)]) == ["a"]
    with pytest.raises(
        data.StagingFailed, match="data/b does not come.* AccessDenied: s3://some/b"
    ):
        next(reading)


def test_a_file_that_is_gone_is_not_waited_for(folder: Path) -> None:
    grows(folder, ["a", "b"])
    come(folder, "a", ".complete")
    with pytest.raises(data.StagingFailed, match="data/b is gone"):
        list(data.files())


def test_the_last_file_is_not_gone_because_its_folder_was_looked_at_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NFS: that there is no such file a host goes by until it opens the folder anew."""
    grows(folder, ["a/b"])
    come(folder, "a/b", ".complete")
    real_open, real_exists, opened = os.open, os.path.exists, []

    def noted(path: str, *args: int, **kwargs: int) -> int:
        opened.append(path)
        return real_open(path, *args, **kwargs)

    def exists(path: str) -> bool:
        return real_exists(path) and (not path.endswith("a/b") or os.path.dirname(path) in opened)

    monkeypatch.setattr(os, "open", noted)
    monkeypatch.setattr(os.path, "exists", exists)
    assert named(folder, data.files()) == ["a/b"]


@pytest.mark.parametrize("to", ["me@host.1234:1700000000", "/moved/since"])
def test_a_link_to_nothing_is_not_waited_for(folder: Path, to: str) -> None:
    """Of a folder that was not staged: an editor's lock, and a file elsewhere."""
    come(folder, "a")
    (folder / ".#a").symlink_to(to)
    with pytest.raises(data.StagingFailed, match=rf"data/\.#a is a link to {to}, .*Remove the lin"):
        list(data.files())
    assert named(folder, data.files("a*")) == ["a"]


def test_a_file_that_is_removed_after_it_was_listed_is_not_waited_for(folder: Path) -> None:
    come(folder, "a", "b", "c")
    reading = data.files()
    assert named(folder, [next(reading)]) == ["a"]
    (folder / "b").unlink()
    with pytest.raises(data.StagingFailed, match="data/b is gone: .* Put it back"):
        next(reading)


def test_each_rank_has_files_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grows(folder, ["a1", "a2", "a3", "b", "c"])
    come(folder, "a1", "a2", "a3", "b", "c", ".complete")
    parts = []
    for rank in range(3):
        monkeypatch.setattr(data, "PLACEMENT", Placement(rank, 3, rank, 3, True))
        parts.append(named(folder, data.files("a*", by_rank=True)))
    assert parts == [["a1"], ["a2"], ["a3"]]
    assert named(folder, data.files("b", by_rank=True)) == []
    with pytest.raises(FileNotFoundError):
        list(data.files("d", by_rank=True))


def test_the_step_hears_of_who_reads_to_the_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "records"
    records.mkdir()
    monkeypatch.setenv("DDL_RECORD_DIR", str(records))
    grows(folder, ["a", "b"])
    come(folder, "a")
    reading = data.files()
    next(reading)
    assert os.listdir(records) == []
    come(folder, "b")
    next(reading)  # the last one; nobody need ask for more
    assert os.listdir(records) == ["rank-0.read"]


def test_without_a_folder_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_DIR", raising=False)
    with pytest.raises(RuntimeError, match="DATA_DIR is not set"):
        data.files()


def test_it_needs_no_tensorflow(folder: Path) -> None:
    come(folder, "a")
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['numpy'] = None;"
        "from ddl_ops.data import files; print(*files())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(PYTHON), "DATA_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(folder / "a")


def test_a_folder_that_may_not_be_read_is_named(folder, monkeypatch):
    come(folder, "day-1/a", "day-2/b", "lost+found/c")
    scandir = os.scandir

    def refuse(path):
        if os.path.basename(path) in ("day-2", "lost+found"):
            raise PermissionError(errno.EACCES, "no", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.warns(UserWarning, match="day-2 may not be read") as told:
        assert named(folder, data.files()) == ["day-1/a"]
    assert len(told) == 1

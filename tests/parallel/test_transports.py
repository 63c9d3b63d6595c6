"""The ways in which ranks reach each other: each works, says so, and leaves nothing behind."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.conftest import CHECKS

SCRIPT = Path(__file__).resolve().parent / "scripts" / "every_check.py"


@pytest.mark.parametrize(
    ("transport", "over"),
    [("auto", "shared memory"), ("shm", "shared memory"), ("mpi", "MPI")],
)
def test_ranks_say_how_they_reach_each_other(
    run_ranks: Callable, transport: str, over: str
) -> None:
    ended = run_ranks(
        "ends.py", 2, "healthy", DDL_OPTIONS="", DDL_TRANSPORT=transport, DDL_LOG="info"
    )
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        assert ended.lines_of(rank) == ["total [2.0, 1.0]", "end of script"]
        assert f"ddl: rank {rank}: of 2, local rank {rank} of 2, over {over}\n" in ended.output


def test_everything_works_between_hosts_too(
    mpirun: str, run_command: Callable, tmp_path: Path
) -> None:
    # Rank 1 is alone on its host, as far as the ranks know.
    command = [mpirun, "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    for host, colon in (("a", []), ("b", [":"]), ("a", [":"])):
        program = [sys.executable, str(SCRIPT)]
        command += [*colon, "-np", "1", "-x", f"DDL_HOSTID={host}", *program]
    progress = str(tmp_path / "progress.jsonl")
    ended = run_command(
        command, {"DDL_OPTIONS": "-mode p", "DDL_PROGRESS": progress, "DDL_LOG": "info"}, 180
    )
    assert ended.returncode == 0, ended.output
    for rank in range(3):
        over = "shared memory, and MPI between hosts"
        assert f"ddl: rank {rank}: of 3, local rank {rank} of 3, over {over}\n" in ended.output
        passed = [line for line in ended.lines_of(rank) if line.endswith(": ok")]
        assert passed == [f"{name}: ok" for name in CHECKS], ended.output


def test_unknown_transport_is_refused(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "healthy", DDL_OPTIONS="", DDL_TRANSPORT="pigeon")
    assert ended.returncode != 0
    assert "DDL_TRANSPORT is 'pigeon'. Give one of: auto, shm, mpi." in ended.output


def test_killed_rank_ends_all(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 3, "killed", DDL_OPTIONS="")
    assert ended.returncode != 0
    said = re.search(r"> killed at ([0-9.]+)", ended.output)
    assert said is not None, ended.output
    assert ended.at - float(said[1]) < 10
    assert "end of script" not in ended.output

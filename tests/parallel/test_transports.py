"""The ways in which ranks reach each other: each works, says so, and leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.conftest import OPS, checks_for
from tests.soak.driver import mpirun_command

SCRIPT = Path(__file__).resolve().parent / "scripts" / "every_check.py"


@pytest.mark.parametrize(
    ("transport", "over"),
    [("auto", "shared memory"), ("shm", "shared memory"), ("mpi", "MPI")],
)
def test_ranks_say_how_they_reach_each_other(
    driver: Path, run_command: Callable, transport: str, over: str
) -> None:
    settings = {"DDL_TRANSPORT": transport, "DDL_LOG": "info"}
    ended = run_command(mpirun_command(2, str(driver), "measured"), settings, 60)
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        assert f"ddl: rank {rank}: of 2, local rank {rank} of 2, over {over}\n" in ended.output


# Runs a command on which the kernel imposes that no file, in memory or not, grows beyond 512 bytes,
# if it is rank $1. Without the signal that would else end it.
_NO_FILES = """
if [ "$OMPI_COMM_WORLD_RANK" = "$1" ]; then trap '' XFSZ; ulimit -f 1; fi
shift
exec "$@"
"""


def test_rank_says_why_it_cannot_share_memory(driver: Path, run_command: Callable) -> None:
    command = mpirun_command(
        2, "/bin/sh", "-c", _NO_FILES, "limited", "0", str(driver), "nobody is missing"
    )
    ended = run_command(command, {"DDL_LOG": "info"}, 60)
    assert ended.returncode == 0, ended.output
    why = "no shared memory, over MPI instead: Shared memory: cannot reserve"
    assert ended.output.count(why) == 1, ended.output
    assert f"ddl: rank 0: {why}" in ended.output
    assert "File too large" in ended.output
    for rank in range(2):
        assert f"ddl: rank {rank}: of 2, local rank {rank} of 2, over MPI\n" in ended.output


# $1: the threads that rank 0 asks for, one less on each rank more. $2: the blocks of 512 bytes that
# no file, in memory or not, may grow beyond on rank 0.
_THREADS = """
export DDL_THREADS=$(($1 - OMPI_COMM_WORLD_RANK))
if [ "$OMPI_COMM_WORLD_RANK" = 0 ]; then trap '' XFSZ; ulimit -f "$2"; fi
shift 2
exec "$@"
"""


@pytest.mark.parametrize(
    ("asked", "blocks", "threads"),
    [("3", "unlimited", 2), ("5", "16000", 2), ("2", "unlimited", 1)],
)
def test_ranks_of_a_host_have_equally_many_threads(
    driver: Path, run_command: Callable, asked: str, blocks: str, threads: int
) -> None:
    command = ["/bin/sh", "-c", _THREADS, "threads", asked, blocks, str(driver), "measured"]
    ended = run_command(mpirun_command(2, *command), {"DDL_LOG": "info"}, 60)
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        assert (
            f"ddl: rank {rank}: of 2, local rank {rank} of 2, over shared memory\n" in ended.output
        )
        said = f"ddl: rank {rank}: reduces with {threads} threads\n" in ended.output
        assert said == (threads > 1), ended.output
    lack = "no memory for more than 2 threads of each rank: Shared memory: cannot reserve"
    assert ended.output.count(f"ddl: rank 0: {lack}") == ended.output.count(lack)
    assert (lack in ended.output) == (blocks != "unlimited"), ended.output


def test_everything_works_between_hosts_too(
    mpirun: str, run_command: Callable, tmp_path: Path
) -> None:
    # Rank 1 is alone on its host, as far as the ranks know.
    checks = checks_for(3, *OPS)
    command = [mpirun, "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    for host, colon in (("a", []), ("b", [":"]), ("a", [":"])):
        program = [sys.executable, str(SCRIPT), *checks]
        command += [*colon, "-np", "1", "-x", f"DDL_HOSTID={host}", *program]
    progress = str(tmp_path / "progress.jsonl")
    ended = run_command(
        command, {"DDL_OPTIONS": "-mode p", "DDL_PROGRESS": progress, "DDL_LOG": "info"}, 600
    )
    assert ended.returncode == 0, ended.output
    for rank in range(3):
        over = "shared memory, and MPI between hosts"
        assert f"ddl: rank {rank}: of 3, local rank {rank} of 3, over {over}\n" in ended.output
        passed = [line for line in ended.lines_of(rank) if line.endswith(": ok")]
        assert passed == [f"{name}: ok" for name in checks], ended.output


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("DDL_TRANSPORT=pigeon", "DDL_TRANSPORT is 'pigeon'. Give one of: auto, shm, mpi."),
        ("DDL_THREADS=all", "DDL_THREADS is 'all'. Give a whole number from 1 to 64."),
    ],
)
def test_settings_without_a_meaning_are_refused(
    driver: Path, run_command: Callable, setting: str, sentence: str
) -> None:
    name, value = setting.split("=")
    ended = run_command(mpirun_command(2, str(driver), "measured"), {name: value}, 60)
    assert ended.returncode != 0
    assert sentence in ended.output

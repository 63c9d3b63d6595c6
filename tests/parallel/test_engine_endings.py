"""Endings in which messages of ranks cross on the way, the worse ones tried several times; and
gathers and orders that TensorFlow would need much time or luck for.

A rank that gives up and one that arrives late must come to the same end, whoever is faster: else
one of them waits in MPI for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.limits import within
from tests.soak.driver import mpirun_command

OK, FAILED_PRECONDITION, DEADLINE_EXCEEDED = 0, 2, 3


@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("nobody is missing", OK),
        ("rank 0 is missing", DEADLINE_EXCEEDED),
        ("rank 1 is missing", DEADLINE_EXCEEDED),
        ("rank 0 leaves", FAILED_PRECONDITION),
        ("rank 1 leaves", FAILED_PRECONDITION),
        ("two sessions", FAILED_PRECONDITION),
    ],
)
def test_all_ranks_come_to_the_same_end(
    driver: Path, run_command: Callable, how: str, code: int, ranks: int, transport: str
) -> None:
    for _ in range(2 if code == DEADLINE_EXCEEDED else 1):
        ended = run_command(
            mpirun_command(ranks, str(driver), how),
            {"DDL_TRANSPORT": transport}
            | ({"DDL_STALL_TIMEOUT": f"{within(0.4):.2f}"} if code == DEADLINE_EXCEEDED else {}),
            30,
        )
        assert ended.returncode == 0, ended.output
        total = f"{OK} {ranks * 100 + sum(range(ranks)):g}"
        for rank in range(ranks):
            first, *rest = ended.lines_of(rank)
            assert first == total
            left = how == ("rank 0 leaves" if rank == 0 else "rank 1 leaves") and rank < 2
            assert rest == ([] if left else [total if code == OK else f"{code} 0"] * 50)


@pytest.mark.parametrize("transport", ["shm", "mpi", "hosts"])
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_stood_still_longer_than_the_limit_go_on(
    driver: Path, run_command: Callable, late: int, transport: str
) -> None:
    """All of them, as in a job that Slurm suspends; the one that is waited for goes on last."""
    program = [str(driver), f"rank {late} is missing", "all stand still"]
    if transport == "hosts":
        environment = {}
        command = mpirun_command(1, "-x", "DDL_HOSTID=a", *program)
        command += [":", "-np", "1", "-x", "DDL_HOSTID=b", *program]
    else:
        environment = {"DDL_TRANSPORT": transport}
        command = mpirun_command(2, *program)
    ended = run_command(command, environment | {"DDL_STALL_TIMEOUT": f"{within(1.5):.2f}"}, 60)
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        assert ended.lines_of(rank) == [f"{OK} 201"] * 51, ended.output


def test_a_leader_that_stands_still_is_given_up_on_its_host_too(
    driver: Path, run_command: Callable
) -> None:
    """Rank 1 waits for another host, whose rank 0 comes when rank 1 is long given up."""
    program = [str(driver), "rank 0 is missing", "rank 1 stands still"]
    command = mpirun_command(1, "-x", "DDL_HOSTID=a", *program)
    command += [":", "-np", "2", "-x", "DDL_HOSTID=b", *program]
    ended = run_command(command, {"DDL_STALL_TIMEOUT": f"{within(0.6):.2f}"}, 60)
    assert ended.returncode == 0, ended.output
    for rank in range(3):
        expected = [f"{OK} 303"] + [f"{DEADLINE_EXCEEDED} 0"] * 50
        assert ended.lines_of(rank) == expected, ended.output


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_a_rank_that_stands_still_in_a_message_is_given_up(
    driver: Path, run_command: Callable, transport: str
) -> None:
    """Also where no rank can read another's memory, as in many containers."""
    environment = {"OMPI_MCA_smsc": "^cma,xpmem,knem", "DDL_TRANSPORT": transport}
    environment |= {"DDL_STALL_TIMEOUT": f"{within(0.6):.2f}"}
    command = mpirun_command(2, str(driver), "long proposal", "rank 1 stands still")
    ended = run_command(command, environment, 60)
    assert ended.returncode == 0, ended.output
    assert "Join: rank 1 did not come within " in ended.output
    for rank in range(2):
        expected = [f"{OK} 201"] + [f"{DEADLINE_EXCEEDED} 0"] * 50
        assert ended.lines_of(rank) == expected, ended.output


@pytest.mark.parametrize("transport", ["shm", "mpi"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_on_an_order_and_remember_it(
    driver: Path, run_command: Callable, ranks: int, transport: str
) -> None:
    ended = run_command(
        mpirun_command(ranks, str(driver), "crossed order"),
        {"DDL_TRANSPORT": transport, "DDL_LOG": "info"},
        60,
    )
    assert ended.returncode == 0, ended.output  # else the driver saw a wrong result
    agreed = [
        ended.output.count(f"ddl: rank {rank}: order: AllReduce ") for rank in range(1, ranks)
    ]
    # Two of three of the 200 steps cross. A rank that is kept from its core may ask again.
    assert sum(agreed) >= 1 and max(agreed) < 40, agreed
    assert "ddl: rank 0: order:" not in ended.output


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_has_joined_hears_of_any_number_of_tensors(
    driver: Path, run_command: Callable, ranks: int
) -> None:
    """Also where no rank can read another's memory, as in many containers."""
    environment = {"OMPI_MCA_smsc": "^cma,xpmem,knem", "DDL_STALL_TIMEOUT": f"{within(10):.2f}"}
    ended = run_command(mpirun_command(ranks, str(driver), "long description"), environment, 60)
    assert ended.returncode == 0, ended.output  # else the driver saw a wrong result
    for rank in range(ranks):
        assert len(ended.lines_of(rank)) == 51, ended.output


@pytest.mark.parametrize(
    ("how", "ranks", "total"), [("large gather", 2, 201), ("no memory", 3, 303)]
)
def test_gathers_of_more_than_2_gib_and_without_memory(
    driver: Path, run_command: Callable, how: str, ranks: int, total: int
) -> None:
    ended = run_command(mpirun_command(ranks, str(driver), how), {}, 120)
    assert ended.returncode == 0, ended.output  # else the driver saw a wrong result
    for rank in range(ranks):
        assert ended.lines_of(rank) == [f"{OK} {total}"] * 51


def test_what_is_asked_for_before_the_ranks_are_connected_is_refused(
    driver: Path, run_command: Callable
) -> None:
    ended = run_command(mpirun_command(2, str(driver), "in vain"), {}, 60)
    assert ended.returncode == 0, ended.output
    assert ended.lines_of(0) == [
        'AllReduce "early": ddl is not running. Call ddl.init (op Init) before the first '
        "collective, and none after the shutdown."
    ]


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_a_rank_that_runs_out_of_memory_fails_on_every_rank(
    driver: Path, run_command: Callable, transport: str
) -> None:
    environment = {"DDL_TRANSPORT": transport, "DDL_STALL_TIMEOUT": "2"}
    ended = run_command(mpirun_command(2, str(driver), "throws"), environment, 60)
    # With messages under way MPI is not finalized, which mpirun takes for a failure.
    assert (ended.returncode == 0) == (transport == "shm"), ended.output
    for rank in range(2):
        total, *said = ended.lines_of(rank)
        assert total == f"{OK} 201"
        freed = "memory is free" in said
        said = [line for line in said if line != "memory is free"]
        assert "rank 1" in said[0], ended.output
        assert len(said) == 51 and not any(line.startswith(f"{OK} ") for line in said[1:])
        # Where messages are under way, MPI may look at the tensors until the process ends.
        assert freed == (transport == "shm" or rank == 1), ended.output
    assert "rank 1 could not go on: std::bad_alloc" in ended.output


def test_messages_of_one_process_set_keep_no_memory_of_the_others(
    driver: Path, run_command: Callable
) -> None:
    environment = {"DDL_TRANSPORT": "mpi", "DDL_STALL_TIMEOUT": "2"}
    command = mpirun_command(2, str(driver), "throws in a process set")
    ended = run_command(command, environment, 60)
    said = ended.lines_of(0)
    assert "stopped in the middle of a collective" in said[1], ended.output
    assert said[2:4] == ["beside it", "memory is free"], ended.output

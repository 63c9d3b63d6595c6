"""Processes that a rank starts are no ranks: what needs one says so, and all else works in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

CURE = "do this in the script itself, or under `if __name__ == '__main__'`"


def no_rank(rank: int) -> str:
    return f"this process is a child of rank {rank}, and no rank itself"


@pytest.mark.parametrize(
    ("front_end", "how"),
    [("dl_comm", "fork"), ("dl_comm", "forkserver"), ("ddl", "spawn")],
)
def test_workers_load_data_and_are_no_ranks(run_ranks: Callable, front_end: str, how: str) -> None:
    ended = run_ranks("children.py", 2, front_end, how, timeout_s=120, DDL_OPTIONS="-mode p")
    assert ended.returncode == 0, ended.output
    call = {"ddl": "ddl.allreduce_n()", "dl_comm": "dl_comm.average()"}[front_end]
    for rank in (1,) if front_end == "ddl" else (0, 1):
        said = ended.lines_of(rank)
        assert said[0] == said[4] == "total [2.0, 1.0]", ended.output
        assert said[1].startswith(f"sample 0 for rank {rank} of 2, RuntimeError: {call} needs")
        assert no_rank(rank) in said[1] and CURE in said[1], said
        assert said[2] == "LookupError: no sample 1"
        assert said[3].startswith(f"sample 2 for rank {rank} of 2, RuntimeError: ")
        assert said[5:] == ["end of script"]


def test_forked_child_that_raises_ends_alone(run_ranks: Callable) -> None:
    ended = run_ranks("children.py", 2, "dl_comm", "os.fork", timeout_s=60)
    assert ended.returncode == 0, ended.output
    assert ended.output.count("LookupError: the child has had enough") == 2, ended.output
    for rank in range(2):
        first, child, *rest = ended.lines_of(rank)
        assert first == "total [2.0, 1.0]"
        assert no_rank(rank) in child, ended.output
        assert rest == ["child ended with 1", "total [2.0, 1.0]", "end of script"]


def test_program_that_a_rank_starts_is_no_rank(run_ranks: Callable) -> None:
    ended = run_ranks("children.py", 2, "dl_comm", "subprocess", timeout_s=60)
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        child = ended.lines_of(rank)[1]
        assert child.startswith(f"child: 1 {rank} RuntimeError: dl_comm.init_mpi() needs"), child
        assert no_rank(rank) in child

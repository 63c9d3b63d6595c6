"""A rank that raises, leaves or does not come: no hang, and an error that says who and what."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.limits import within

OPTIONS = {"DDL_OPTIONS": "-mode p"}


def seconds_since(word: str, ended) -> float:
    """From the time that a rank said to the end of the job."""
    return ended.at - float(re.search(rf"> {word} at ([0-9.]+)", ended.output)[1])


def warned(ended, words: str) -> None:
    """Whether a rank said it after half of the limit of 3 s; ``{}`` is how long it has waited."""
    waited = re.search(re.escape(words).replace(r"\{\}", "waited ([0-9.]+) s"), ended.output)
    assert waited and 1.5 <= float(waited[1]) < 3, ended.output


def test_raising_rank_ends_all(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 3, "raise", **OPTIONS)
    assert ended.returncode != 0
    assert seconds_since("raising", ended) < within(10)
    assert "Traceback (most recent call last)" in ended.output
    assert "ValueError: this rank has had enough" in ended.output
    assert "end of script" not in ended.output


def test_rank_that_exits_fails_the_others(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "exit 3", **OPTIONS)
    assert ended.returncode != 0
    assert seconds_since("exiting", ended) < within(10)
    assert 'AllReduceN "AllReduceN": rank 1 has already ended its script' in ended.output


def test_exit_code_of_all_ranks_is_kept(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "exit 3 together", **OPTIONS)
    assert ended.returncode == 3, ended.output


def test_early_end_is_an_error_for_those_who_go_on(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "early end", **OPTIONS)
    assert seconds_since("ending", ended) < within(10)
    said = ended.lines_of(1)
    assert len(said) == 4, ended.output
    for line in said[1:3]:  # and again for the next collective
        waited = re.match("FailedPreconditionError after ([0-9.]+) s", line)
        assert waited and float(waited[1]) < within(1), said
        assert 'AllReduceN "AllReduceN": rank 0 has already ended its script, but rank 1' in line


def test_missing_member_is_named_on_every_rank(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 3, "missing member", DDL_STALL_TIMEOUT="3", **OPTIONS)
    warned(ended, 'ddl: rank 0: AllReduceN "AllReduceN": {} for rank 1 so far (limit 3.0 s)')
    for rank in range(3):
        said = ended.lines_of(rank)
        assert len(said) == 4, ended.output
        for line in said[1:3]:
            assert line.startswith("DeadlineExceededError after "), said
            assert 'AllReduceN "AllReduceN": rank 1 did not come within 3.0 s' in line
        waited = float(re.search(r"after ([0-9.]+) s", said[1])[1])
        assert waited < within(1) if rank == 1 else 2.5 < waited < 3 + within(2)
    assert ended.returncode == 0, ended.output  # every rank caught the error and went home


def test_missing_root_is_named_on_every_rank(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "missing root", DDL_STALL_TIMEOUT="3", **OPTIONS)
    warned(ended, 'ddl: rank 1: AllReduceN "AllReduceN": {} for rank 0 so far (limit 3.0 s)')
    first, second = ended.lines_of(0), ended.lines_of(1)
    assert len(first) == len(second) == 4, ended.output
    assert "rank 1 waited longer than 3.0 s for rank 0 and gave up" in first[1]
    assert "rank 0 did not come within 3.0 s" in second[1]
    assert ended.returncode == 0, ended.output


def test_limit_counts_from_the_arrival_of_rank_0(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 3, "slow member", DDL_STALL_TIMEOUT="5", **OPTIONS)
    assert ended.returncode == 0, ended.output
    for rank in range(3):
        assert ended.lines_of(rank) == ["total [3.0, 3.0]"] * 2 + ["end of script"]


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_free_standing_mismatch_is_named_and_the_next_one_runs(
    run_ranks: Callable, transport: str
) -> None:
    ended = run_ranks("ends.py", 2, "free-standing mismatch", DDL_TRANSPORT=transport, **OPTIONS)
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        said = ended.lines_of(rank)
        assert said[1].startswith("InvalidArgumentError after "), said
        assert 'AllReduce "b": rank 1 sent float32[3] as tensor 0, rank 0 float32[2].' in said[1]
        assert said[2:] == ["total [2.0, 1.0]", "end of script"]


@pytest.mark.parametrize("transport", ["shm", "mpi"])
def test_free_standing_collective_that_a_rank_never_runs_is_named(
    run_ranks: Callable, transport: str
) -> None:
    ended = run_ranks(
        "ends.py",
        3,
        "free-standing missing",
        DDL_STALL_TIMEOUT="3",
        DDL_TRANSPORT=transport,
        **OPTIONS,
    )
    assert ended.returncode == 0, ended.output
    why = 'AllReduce "a": {}; rank 1 waits for AllReduce "b" instead'
    warned(ended, why.format("{} for rank 1 so far (limit 3.0 s)"))
    for rank in range(3):
        said = ended.lines_of(rank)
        assert len(said) == 4, ended.output
        for line in said[1:3]:
            assert line.startswith("DeadlineExceededError after "), said
            assert why.format("rank 1 did not come within 3.0 s") in line, said
        assert 2.5 < float(re.search(r"after ([0-9.]+) s", said[1])[1]) < 3 + within(2)


def test_rank_that_ends_while_it_is_waited_for_by_name_fails_the_others(
    run_ranks: Callable,
) -> None:
    ended = run_ranks("ends.py", 2, "free-standing left", **OPTIONS)
    assert seconds_since("ending", ended) < within(10)
    said = ended.lines_of(0)
    assert said[1].startswith("FailedPreconditionError after "), ended.output
    assert 'AllReduce "a": rank 1 has already ended its script, but rank 0' in said[1]

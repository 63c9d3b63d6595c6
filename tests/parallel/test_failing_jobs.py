"""A rank that raises, leaves or does not come: no hang, and an error that says who and what."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.limits import within

OPTIONS = {"DDL_OPTIONS": "-mode p"}


def test_early_end_is_an_error_for_those_who_go_on(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "early end", **OPTIONS)
    assert ended.seconds_since("ending") < within(10)
    said = ended.lines_of(1)
    assert len(said) == 4, ended.output
    for line in said[1:3]:  # and again for the next collective
        waited = re.match("FailedPreconditionError after ([0-9.]+) s", line)
        assert waited and float(waited[1]) < within(1), said
        assert 'AllReduceN "AllReduceN": rank 0 has already ended its script, but rank 1' in line


def test_missing_member_is_named_on_every_rank(run_ranks: Callable) -> None:
    limit = f"{within(3):.1f}"
    ended = run_ranks("ends.py", 3, "missing member", DDL_STALL_TIMEOUT=limit, **OPTIONS)
    said = f"{{}} for rank 1 so far (limit {limit} s)"
    ended.require_warned(f'ddl: rank 0: AllReduceN "AllReduceN": {said}', limit)
    for rank in range(3):
        said = ended.lines_of(rank)
        assert len(said) == 4, ended.output
        for line in said[1:3]:
            assert line.startswith("DeadlineExceededError after "), said
            assert f'AllReduceN "AllReduceN": rank 1 did not come within {limit} s' in line
        waited = float(re.search(r"after ([0-9.]+) s", said[1])[1])
        is_in_time = float(limit) - 0.5 < waited < float(limit) + within(2)
        assert waited < within(1) if rank == 1 else is_in_time
    assert ended.returncode == 0, ended.output  # every rank caught the error and went home


def test_free_standing_mismatch_is_named_and_the_next_one_runs(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "free-standing mismatch", **OPTIONS)
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        said = ended.lines_of(rank)
        assert said[1].startswith("InvalidArgumentError after "), said
        assert 'AllReduce "b": rank 1 sent float32[3] as tensor 0, rank 0 float32[2].' in said[1]
        assert said[2:] == ["total [2.0, 1.0]", "end of script"]


def test_free_standing_collective_that_a_rank_never_runs_is_named(run_ranks: Callable) -> None:
    limit = f"{within(3):.1f}"
    ended = run_ranks("ends.py", 3, "free-standing missing", DDL_STALL_TIMEOUT=limit, **OPTIONS)
    assert ended.returncode == 0, ended.output
    why = 'AllReduce "a": {}; rank 1 waits for AllReduce "b" instead'
    said = f"{{}} for rank 1 so far (limit {limit} s)"
    ended.require_warned(why.format(said), limit)
    for rank in range(3):
        said = ended.lines_of(rank)
        assert len(said) == 4, ended.output
        for line in said[1:3]:
            assert line.startswith("DeadlineExceededError after "), said
            assert why.format(f"rank 1 did not come within {limit} s") in line, said
        waited = float(re.search(r"after ([0-9.]+) s", said[1])[1])
        assert float(limit) - 0.5 < waited < float(limit) + within(2)


def test_gradients_of_one_function_in_two_threads_are_refused_not_mixed(
    run_ranks: Callable,
) -> None:
    """Nothing else of it keeps an order; rank 1 could be given either of rank 0's."""
    limit = f"{within(20):.1f}"
    ended = run_ranks("ends.py", 2, "gradients of two threads", DDL_STALL_TIMEOUT=limit, **OPTIONS)
    refused = "FailedPreconditionError: "
    for said in ended.lines_of(0)[2:4]:
        assert said.startswith(refused) and "run one function at once" in said, ended.output
    (alone,) = ended.lines_of(1)[2:3]
    got_one = alone in ("gradient 2.0", "gradient 101.0")  # before it heard of the refusal
    assert got_one or alone.startswith(refused), ended.output


def test_rank_that_ends_while_it_is_waited_for_by_name_fails_the_others(
    run_ranks: Callable,
) -> None:
    ended = run_ranks("ends.py", 2, "free-standing left", **OPTIONS)
    assert ended.seconds_since("ending") < within(10)
    said = ended.lines_of(0)
    assert said[1].startswith("FailedPreconditionError after "), ended.output
    assert 'AllReduce "a": rank 1 has already ended its script, but rank 0' in said[1]

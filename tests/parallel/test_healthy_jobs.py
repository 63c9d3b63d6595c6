"""Everything that works in a healthy job, on 1 to 3 ranks: one job for each, many checks in it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.parallel.conftest import OPS, checks_for

# Of Keras, what has a branch for one rank, and some that train; and what can differ among three.
KERAS_ON_ONE = [
    "keras_parts_of_a_batch_train_as_the_whole",
    "keras_fit_ends_with_equal_weights_and_reports",
    "keras_custom_loop_ends_with_equal_weights",
    "keras_weights_that_end_apart_are_an_error_on_every_rank",
    "keras_ranks_that_are_asked_to_end_go_on_with_the_batches_that_each_had_left",
]
KERAS_ON_THREE = [
    "keras_ranks_without_a_batch_have_the_metrics_of_the_others",
    "keras_ranks_with_more_batches_go_on_without_the_others",
    "keras_ranks_that_are_asked_to_end_go_on_with_the_batches_that_each_had_left",
]
NAMES = {
    1: [*checks_for(1, *OPS, "tf1"), *KERAS_ON_ONE],
    2: checks_for(2),
    3: [*checks_for(3, *OPS), *KERAS_ON_THREE],
}


@pytest.fixture(scope="module")
def run_checks(run_ranks, tmp_path_factory):
    """run_checks(ranks) -> how they ended, and the file of their progress; one job for each."""
    jobs = {}

    def run(ranks: int):
        if ranks not in jobs:
            jobs[ranks] = None
            progress = tmp_path_factory.mktemp("job") / "progress.jsonl"
            options = {"DDL_OPTIONS": "-mode p", "DDL_PROGRESS": str(progress)}
            names = NAMES[ranks]
            ended = run_ranks("every_check.py", ranks, *names, timeout_s=600, **options)
            jobs[ranks] = ended, progress
        assert jobs[ranks], "the job did not end: see the first test that failed"
        return jobs[ranks]

    return run


@pytest.mark.parametrize(
    ("ranks", "name"), [(ranks, name) for ranks, names in NAMES.items() for name in names]
)
def test_check_passes_on_every_rank(run_checks, ranks: int, name: str) -> None:
    ended, _ = run_checks(ranks)
    said = [line for r in range(ranks) for line in ended.lines_of(r) if line.startswith(f"{name}:")]
    assert said == [f"{name}: ok"] * ranks, ended.output


@pytest.mark.parametrize("ranks", NAMES)
def test_job_ends_cleanly(run_checks, ranks: int) -> None:
    ended, _ = run_checks(ranks)
    assert ended.returncode == 0, ended.output
    assert "prterun" not in ended.output


@pytest.mark.parametrize("ranks", NAMES)
def test_ops_report_progress_of_rank_0(run_checks, ranks: int) -> None:
    _, progress = run_checks(ranks)
    lines = [json.loads(line) for line in progress.read_text().splitlines()]
    ours = [line for line in lines if line["source"] == "ops"]
    assert ours, lines
    names = ("t", "step", "comm_s", "wait_s", "bytes_reduced")
    assert all(set(line) == {"source", *names} for line in ours)
    for name in names:
        assert [line[name] for line in ours] == sorted(line[name] for line in ours)
    assert ours[-1]["step"] > 20
    assert ours[-1]["bytes_reduced"] > 4 * 3_000_001


def test_explicit_mode_needs_init(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "explicit")
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        said = ended.lines_of(rank)
        assert said[0] == f"placement {rank} 2 {rank} 1"
        assert said[1].startswith("RuntimeError: ddl.bcast() before ddl.init()")
        assert said[2].startswith("RuntimeError: ddl.allreduce_n() before ddl.init()")
        assert said[3].startswith("RuntimeError: ddl.allreduce() before ddl.init()")
        assert said[4].startswith("RuntimeError: ddl.allgather() before ddl.init()")
        assert said[5].startswith("FailedPreconditionError: "), said
        assert "DdlRank: ddl is not running. Call ddl.init (op Init) first." in said[5]
        assert said[6] == f"not reduced {5.0 - rank}"
        assert said[7].startswith("RuntimeError: ddl is already initialised")
        assert said[8:] == ["total [2.0, 1.0]", "end of script"]


@pytest.mark.parametrize("options", [{}, {"DDL_OPTIONS": "-mode p"}], ids=["plain", "options"])
def test_alone_there_is_one_rank_and_explicit_calls_say_how_to_start(
    run_alone: Callable, options: dict[str, str]
) -> None:
    ended = run_alone("ends.py", "alone", **options)
    assert ended.returncode == 0, ended.output
    said = ended.lines_of(0)
    assert said[0] == "placement 0 1 0 1"
    calls = (
        *("init", "bcast", "allreduce_n", "allreduce", "allgather", "grads_reduce"),
        *("barrier", "join"),
    )
    for call, line in zip(calls, said[1:], strict=False):
        assert line.startswith(f"RuntimeError: ddl.{call}() needs several ranks"), said
        assert "ddl-run --np 2 python script.py" in line
    assert said[-2:] == ["trained alone", "end of script"]

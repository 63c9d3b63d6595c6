"""Everything that works in a healthy job, on 1 to 3 ranks: one job for each, many checks in it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.limits import within
from tests.parallel.conftest import CHECKS, OF_OPS


@pytest.fixture(scope="module")
def run_checks(run_ranks, tmp_path_factory):
    """run_checks(ranks, *names) -> ranks, how they ended, and their progress lines."""

    def run(ranks: int, *names: str):
        progress = tmp_path_factory.mktemp("job") / "progress.jsonl"
        options = {"DDL_OPTIONS": "-mode p", "DDL_PROGRESS": str(progress)}
        ended = run_ranks("every_check.py", ranks, *names, timeout_s=600, **options)
        return ranks, ended, progress

    return run


@pytest.fixture(scope="module", params=[1, 3], ids=lambda ranks: f"np{ranks}")
def job(request, run_checks):
    return run_checks(request.param)


@pytest.fixture(scope="module")
def job_of_two(run_checks):
    """The ops alone: the front ends over them have been tried with others, and with none."""
    return run_checks(2, *OF_OPS)


def passed_everywhere(job, name: str) -> None:
    ranks, ended, _ = job
    said = [line for r in range(ranks) for line in ended.lines_of(r) if line.startswith(f"{name}:")]
    assert said == [f"{name}: ok"] * ranks, ended.output


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_on_every_rank(job, name: str) -> None:
    passed_everywhere(job, name)


@pytest.mark.parametrize("name", OF_OPS)
def test_check_passes_on_two_ranks(job_of_two, name: str) -> None:
    passed_everywhere(job_of_two, name)


def test_job_ends_cleanly(job) -> None:
    _, ended, _ = job
    assert ended.returncode == 0, ended.output
    assert "prterun" not in ended.output


def test_ops_report_progress_of_rank_0(job) -> None:
    _, _, progress = job
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


def test_mpi4py_may_start_and_end_mpi(run_ranks: Callable) -> None:
    ended = run_ranks("ends.py", 2, "mpi4py first", DDL_OPTIONS="-mode p")
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        assert ended.lines_of(rank) == [
            f"mpi4py: rank {rank} of 2",
            "total [2.0, 1.0]",
            "finalized by mpi4py",
            "end of script",
        ]


def test_ranks_wait_for_a_late_one_at_the_end(run_ranks: Callable) -> None:
    stall = f"{within(0.5):.2f}"
    ended = run_ranks("ends.py", 3, "late end", DDL_OPTIONS="", DDL_STALL_TIMEOUT=stall)
    assert ended.returncode == 0, ended.output
    assert "waiting for" not in ended.output
    for rank in range(3):
        assert ended.lines_of(rank) == ["total [3.0, 3.0]", "end of script"]

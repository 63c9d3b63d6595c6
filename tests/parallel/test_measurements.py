"""What the engine says about itself: timeline and statistics of real ranks."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.soak.driver import mpirun_command

# What engine_driver.cc runs as "measured": name, op, bytes, tensors. All but
# the first are submitted at once, on rank 1 after a sleep of LATE_S.
STEPS = [
    ("total", "AllReduceN", 8, 1),
    ("small", "AllReduceN", 4_000, 1),
    ("large", "AllReduceN", 8_000_000, 2),
    ("weights", "Bcast", 400_000, 1),
    ("rows", "AllGather", 30_000, 1),
]
LATE_S = 1.0


@pytest.fixture(scope="module", params=["shm", "mpi"])
def measured(
    request: Any, driver: Path, run_command: Callable, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """Trace, statistics and output of two ranks; what each said by itself is that of the end."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "timeline.json").write_text("of an earlier run")
    ended = run_command(
        mpirun_command(2, str(driver), "measured"),
        {
            "DDL_TRANSPORT": request.param,
            "DDL_LOG": "info",
            "DDL_TIMELINE": str(folder / "timeline.json"),
            "DDL_STATS": str(folder / "stats.json"),
            "DDL_RECORD_DIR": str(folder),
        },
        60,
    )
    assert ended.returncode == 0, ended.output
    trace = json.loads((folder / "timeline.json").read_text())
    statistics = json.loads((folder / "stats.json").read_text())
    for number, rank in enumerate(statistics["ranks"]):
        so_far = json.loads((folder / f"rank-{number}.communication").read_text())
        assert so_far.pop("t") > 0
        assert so_far == {name: rank[name] for name in ("run_s", "comm_s", "wait_s")}
    return trace, statistics, ended.output


def _ranks(trace: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The spans of rank 0 and of rank 1."""
    names = {e["args"]["name"]: e["pid"] for e in trace if e["name"] == "process_name"}
    pids = [
        next(pid for name, pid in names.items() if name.startswith(f"rank {r} on ")) for r in (0, 1)
    ]
    assert len(names) == len(set(pids)) == 2
    return [[e for e in trace if e["ph"] == "X" and e["pid"] == pid] for pid in pids]


def _collectives(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in spans if "args" in e]


def test_ranks_show_the_same_collectives_in_the_same_order(measured) -> None:
    for spans in _ranks(measured[0]):
        found = _collectives(spans)
        seen = [(e["name"], e["cat"], e["args"]["bytes"], e["args"]["tensors"]) for e in found]
        assert seen == STEPS
        assert [e["args"]["n"] for e in found] == list(range(1, len(STEPS) + 1))
        begins = [e["ts"] for e in found]
        assert begins == sorted(begins)


def test_parts_lie_in_their_collective_and_fill_it(measured) -> None:
    nothing = 0.002  # microseconds: numbers this large have no more digits
    for spans in _ranks(measured[0]):
        parts = [e for e in spans if e["cat"] == "part"]
        for collective in _collectives(spans):
            begin, end = collective["ts"], collective["ts"] + collective["dur"]
            mine = [e for e in parts if begin - nothing <= e["ts"] < end - nothing]
            assert mine[0]["name"] in ("wait for others", "wait and reduce")
            assert mine[0]["ts"] == pytest.approx(begin, abs=nothing)
            assert all(e["ts"] + e["dur"] <= end + nothing for e in mine)
            covered = sum(e["dur"] for e in mine)
            # What is packed is unpacked after it has been reduced.
            if mine[0]["name"] == "wait for others":
                assert covered == pytest.approx(collective["dur"], abs=nothing)
                kind = {"Bcast": "broadcast", "AllGather": "gather"}
                assert [e["name"] for e in mine[1:]] == [kind.get(collective["cat"], "reduce")]
        assert {e["tid"] for e in parts} == {e["tid"] for e in _collectives(spans)} == {1}


def test_queued_collectives_lie_beside_each_other_until_their_turn(measured) -> None:
    rows = []
    for spans in _ranks(measured[0]):
        turns = {e["name"]: e["ts"] for e in _collectives(spans)}
        queued = [e for e in spans if e["cat"] == "queued"]
        assert [e["name"] for e in queued] == [name for name, *_ in STEPS]
        for span in queued:
            assert span["ts"] + span["dur"] == pytest.approx(turns[span["name"]], abs=0.002)
        by_row: dict[int, float] = {}
        for span in queued:
            assert span["ts"] >= by_row.get(span["tid"], 0.0) - 0.002  # no two in one place
            by_row[span["tid"]] = span["ts"] + span["dur"]
        assert 1 not in by_row
        rows.append({e["name"]: e["tid"] for e in queued})
    # Rank 0 waits for rank 1 with "small"; behind it there are three more.
    assert len({rows[0][name] for name in ("large", "weights", "rows")}) == 3


def test_ranks_times_are_of_one_clock(measured) -> None:
    ranks = [_collectives(spans) for spans in _ranks(measured[0])]
    for first, second in zip(*ranks, strict=True):
        # No rank has the result before the other has begun.
        assert first["ts"] < second["ts"] + second["dur"]
        assert second["ts"] < first["ts"] + first["dur"]


def test_statistics_add_up_and_name_the_rank_that_slept(measured) -> None:
    trace, statistics, output = measured
    by_op = {
        op: sum(n for _, o, n, _ in STEPS if o == op) for op in ("AllReduceN", "Bcast", "AllGather")
    }
    for number, (rank, spans) in enumerate(zip(statistics["ranks"], _ranks(trace), strict=True)):
        found = _collectives(spans)
        assert (rank["rank"], rank["collectives"], rank["failed"]) == (number, len(STEPS), 0)
        assert rank["tensors"] == sum(tensors for *_, tensors in STEPS)
        assert rank["bytes_reduced"] == by_op["AllReduceN"]
        assert rank["bytes_broadcast"] == by_op["Bcast"]
        assert rank["bytes_gathered"] == by_op["AllGather"]
        assert rank["comm_s"] == pytest.approx(sum(e["dur"] for e in found) / 1e6, abs=1e-5)
        waits = [e["dur"] / 1e6 for e in spans if e["name"].startswith("wait")]
        assert rank["wait_s"] == pytest.approx(sum(waits), abs=1e-5)
        assert rank["max_wait_s"] == pytest.approx(max(waits), abs=1e-5)
        assert 0 < rank["wait_s"] < rank["comm_s"] <= rank["run_s"]
        assert rank["algbw_gb_s"] > 0
    assert statistics["straggler"]["rank"] == 1
    waited = [rank["wait_s"] for rank in statistics["ranks"]]
    # A busy machine lets rank 0 come late, too.
    assert waited[0] > LATE_S / 2
    assert statistics["straggler"]["share"] == pytest.approx(1 - waited[1] / waited[0], abs=1e-3)
    assert "The others waited most for rank 1: it waited " in output
    assert re.search(r"^ +1 +5 +8\.0 ", output, re.MULTILINE), output


def test_files_of_their_own_and_a_rank_alone(
    driver: Path, run_command: Callable, tmp_path: Path
) -> None:
    names = {
        "DDL_TIMELINE": str(tmp_path / "rank-{rank}.json"),
        "DDL_STATS": str(tmp_path / "stats"),
    }
    ended = run_command(mpirun_command(2, str(driver), "measured"), names, 60)
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        trace = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        (process,) = [e["args"]["name"] for e in trace if e["name"] == "process_name"]
        assert process.startswith(f"rank {rank} on ")
        assert len(_collectives([e for e in trace if e["ph"] == "X"])) == len(STEPS)
    ended = run_command(mpirun_command(1, str(driver), "measured"), names, 60)
    assert ended.returncode == 0, ended.output
    alone = json.loads((tmp_path / "stats").read_text())
    assert alone["straggler"] is None
    assert [rank["collectives"] for rank in alone["ranks"]] == [len(STEPS)]


def test_timeline_of_a_broken_job_is_open_but_whole(
    driver: Path, run_command: Callable, tmp_path: Path
) -> None:
    timeline, statistics = tmp_path / "timeline.json", tmp_path / "stats.json"
    environment = {"DDL_TIMELINE": str(timeline), "DDL_STATS": str(statistics)}
    ended = run_command(mpirun_command(2, str(driver), "rank 0 leaves"), environment, 60)
    assert ended.returncode == 0, ended.output
    text = timeline.read_text()
    assert text.endswith("},\n")
    trace = json.loads(text[:-2] + "]")  # as viewers read it
    errors = [e["args"]["error"] for e in trace if "error" in e.get("args", {})]
    assert len(errors) == 50
    assert "rank 0 has already ended its script" in errors[0]
    assert statistics.read_text() == ""


def test_files_that_cannot_be_written_end_the_job_at_its_start(
    driver: Path, run_command: Callable, tmp_path: Path
) -> None:
    for name in ("DDL_TIMELINE", "DDL_STATS"):
        path = str(tmp_path / "none" / "file.json")
        ended = run_command(mpirun_command(2, str(driver), "measured"), {name: path}, 60)
        assert ended.returncode != 0
        assert f"{name}: cannot write '{path}': No such file" in ended.output


def test_why_it_could_not_start_is_said_whatever_the_name_of_a_file(
    run_command: Callable, tmp_path: Path
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/none/\xff")
    command = mpirun_command(1, sys.executable, "-c", "import ddl; ddl.init()")
    ended = run_command(command, {"DDL_TIMELINE": path}, 60)
    assert "RuntimeError: ddl could not start: DDL_TIMELINE: cannot write" in ended.output

"""What the benchmarks make of their samples. The samples come from real runs only."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks import lineage_answers, report, turns
from benchmarks.collectives import mpis, peer_rank, peers
from benchmarks.collectives.__main__ import OPS, SIZES, summarise, table
from benchmarks.collectives.gradient_sets import GRADIENT_SETS
from benchmarks.dag_parse import __main__ as dag_parse
from benchmarks.dag_parse import folders, processor
from benchmarks.horovod_weights import __main__ as horovod_weights
from benchmarks.staging import __main__ as staging
from benchmarks.staging import faults
from benchmarks.training import __main__ as training
from ddl_airflow.core.manifest.load import load_manifest
from tests.limits import within

LINES = [
    "# stream-copy together 8e9",
    *("shm 1024 1e-6", "mpi 1024 4e-6", "MPI_Allreduce 1024 2e-6"),
    *("shm 1024 2e-6", "mpi 1024 4e-6", "MPI_Allreduce 1024 8e-6"),
    *("shm 1024 9e-6", "mpi 1024 4e-6", "MPI_Allreduce 1024 9e-6"),
    *("shm 134217728 0.016777216", "stream-copy 134217728 0.008388608"),
    *("mpi 134217728 0.1", "MPI_Allreduce 134217728 0.1"),
]


def test_ratios_are_taken_within_rounds() -> None:
    machine, (small, large) = summarise(LINES)
    assert machine == {"stream-copy together": 8e9}
    assert small["shm"]["ratio"] == 2  # of 2, 4 and 1; the medians' would be 4
    assert small["shm"]["median_s"] == 2e-6
    assert small["shm"]["ratio_quartiles"] == [1.5, 3]
    assert round(large["shm"]["algbw"]) == 8e9


def test_table_has_bus_bandwidth_and_share_of_the_bound() -> None:
    _, rows = summarise(LINES)
    _, small, large = table(rows, ranks=4).splitlines()
    assert "%" not in small  # in the caches
    assert large.split()[:2] == ["128", "MiB"]
    assert large.split()[5:8] == ["8.00", "12.00", "50%"]


def test_sizes_are_those_of_the_docs() -> None:
    assert (SIZES[0], SIZES[-1]) == (4, 256 << 20)


def test_quartiles_stay_within_the_samples() -> None:
    compared = report.compare([1.0, 1.0], [2.0, 4.0])
    assert compared["ratio"] == 3
    assert compared["ratio_quartiles"] == [2.5, 3.5]
    assert report.compare([2.0], [4.0])["ratio_quartiles"] == [2, 2]


@pytest.mark.parametrize(
    ("name", "tensors", "elements"),
    [("mnist_cnn", 8, 3_274_634), ("resnet50", 161, 25_557_032), ("transformer", 68, 5_273_088)],
)
def test_gradient_sets_are_those_of_the_models(name: str, tensors: int, elements: int) -> None:
    shapes = GRADIENT_SETS[name]()
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, elements)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("nbytes", [4, 1 << 20, 256 << 20])
def test_a_chain_of_sums_is_exact(ranks: int, nbytes: int) -> None:
    length = peers.chain_length(nbytes, ranks)
    assert 1 <= length <= 16
    totals = [
        sum(int(peer_rank.values(i + 1, rank)[i]) for rank in range(ranks)) * ranks ** (length - 1)
        for i in range(8)
    ]
    assert max(totals) <= 1 << 24  # float32 has every integer up to here
    assert list(peer_rank.chained(list(range(ranks)), length)[:8]) == totals


@pytest.mark.parametrize("at", [0, 1500, 4095])
def test_a_wrong_element_is_seen(at: int) -> None:
    result = peer_rank.values(4096, 2)
    expected = peer_rank.values(1021, 2)
    peer_rank.require(result, expected, "right")
    result[at] += 1
    with pytest.raises(RuntimeError, match="left: wrong result"):
        peer_rank.require(result, expected, "left")


def test_a_shifted_result_is_seen() -> None:
    result = np.roll(peer_rank.values(1 << 16, 0), 1 << 14)
    with pytest.raises(RuntimeError, match="wrong result"):
        peer_rank.require(result, peer_rank.values(1021, 0), "shifted")


def test_peers_are_compared_within_rounds_and_by_collective() -> None:
    cases = [
        {"op": "alltoall", "nbytes": 4, "chain": 4, "pairs": True},
        {"set": "mnist_cnn"},
    ]
    samples = [
        {"ddl": [4e-6, 8e-6], "horovod": [8e-6, 32e-6]},
        {"ddl": [1e-3, 1e-3], "horovod": [2e-3, 2e-3], "horovod grouped": [3e-3, 3e-3]},
    ]
    rows = peers.make_rows(cases, samples, "horovod")
    text = peers.table(rows, ["ddl", "horovod", "horovod grouped"], "horovod").splitlines()
    assert text[0] == "| | ddl | horovod | horovod grouped | ddl × horovod |"
    small = "alltoall, 4 B, two at once, of 4"
    assert text[2] == f"| {small} | 1.5 us | 5 us |  | 3.0 (2.5–3.5) |"
    assert text[3] == "| mnist_cnn: 8 tensors, 13.1 MB | 1 ms | 2 ms | 3 ms | 2.0 (2.0–2.0) |"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("members", [[0, 1], [2, 3], [0, 1, 2]])
def test_what_each_rank_gets_is_right_in_every_element(op: str, members: list[int]) -> None:
    count = peer_rank.elements(op, 8192, len(members))
    inputs = [peer_rank.values(count, member) for member in members]
    share = count // len(members)
    for number, rank in enumerate(members):
        own = slice(number * share, (number + 1) * share)
        wanted = {
            "allreduce": sum(inputs),
            "reducescatter": sum(inputs)[own],
            "allgather": np.concatenate(inputs),
            "alltoall": np.concatenate([one[own] for one in inputs]),
            "broadcast": inputs[0],
        }[op]
        result = peer_rank.result_of(op, count, members, rank)
        assert np.array_equal(result, wanted)
        result[-1] += 1
        with pytest.raises(RuntimeError, match="wrong result"):
            peer_rank.require(result, wanted, op)


def test_whoever_does_an_op_is_asked_for_it() -> None:
    def asked(**case: object) -> list[str]:
        return [column for column in peers.SET_COLUMNS if peers.has(column, case)]

    assert asked(set="resnet50") == list(peers.SET_COLUMNS)
    assert asked(op="allreduce", pairs=False) == list(peers.COLUMNS)
    for case in ({"op": "allgather", "pairs": False}, {"op": "allreduce", "pairs": True}):
        assert asked(**case) == peers.WHOLE_COLUMNS


def test_pairs_need_two_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SystemExit),
    ):
        patch.setattr(sys, "argv", ["peers", "--pairs", "--ranks", "2"])
        peers.main()
    assert "--pairs needs --ranks 4 or another even number, not 2" in capsys.readouterr().err


def test_of_a_chain_tensorflow_leaves_nothing_out() -> None:
    """It does of what has no side effects, and whose result nobody takes."""
    import tensorflow as tf

    rank = peer_rank.TensorFlowRank(0, 1)
    rank.one["plain", "allgather"] = lambda tensor, name, _: tf.raw_ops.Snapshot(input=tensor)
    chain = rank.chain("plain", "allgather", 4, 3, pairs=False)
    graph = chain.get_concrete_function(tf.constant([1.0])).graph
    steps = [one for one in graph.get_operations() if one.type == "Snapshot"]
    assert len(steps) == 3 and all(one.outputs[0].consumers() for one in steps)


def test_our_collectives_are_measured_through_tensorflow(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.collectives.peers", "--columns", "ddl, TF 2.21"),
            *("--ops", *OPS, "--sizes", "4000", "--sets", "--rounds", "1", "--json", str(out)),
        ],
        env=os.environ | {"PYTHONPATH": str(report.REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within(300),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert [row["op"] for row in rows if row["chain"] == 1] == OPS
    assert all(len(row["ddl, TF 2.21"]["samples_s"]) == 1 for row in rows)


def test_training_is_compared_with_ideal_and_with_horovod() -> None:
    def samples(*seconds: float) -> list[dict[str, float]]:
        return [{"step_s": one, "cpu_s": one} for one in seconds]

    rows = training.make_rows(
        {"ddl": samples(0.125), "horovod": samples(0.25), "alone": samples(0.1)},
        {"ddl": 2, "horovod": 2, "alone": 1},
        batch=100,
    )
    text = training.table(rows).splitlines()
    ours, alone = "0.80 (0.80–0.80)", "1.00 (1.00–1.00)"
    assert text[2] == f"| ddl | 1600 | 125 ms | 125 ms | {ours} | 2.00 (2.00–2.00) |"
    assert text[4] == f"| alone | 1000 | 100 ms | 100 ms | {alone} |  |"


def test_pipelined_steps_are_compared_with_blocking_ones() -> None:
    samples = {
        name: [{"step_s": seconds, "cpu_s": seconds}]
        for name, seconds in zip(training.TEAMS, (0.3, 0.2), strict=True)
    }
    rows = training.make_rows(samples, dict.fromkeys(training.TEAMS, 2), batch=100)
    text = training.table(rows).splitlines()
    assert text[-1] == "pipelined × blocking: 1.50 (1.50–1.50)"


def test_groups_are_compared_with_all_in_one() -> None:
    times = {"ddl": 0.3, "ddl, DDL_GROUP_SIZE=100": 0.2, "ddl, DDL_GROUP_SIZE=10": 0.4}
    samples = {name: [{"step_s": one, "cpu_s": one}] for name, one in times.items()}
    text = training.table(training.make_rows(samples, dict.fromkeys(times, 2), 100)).splitlines()
    assert "ddl, DDL_GROUP_SIZE=100 × all in one: 1.50 (1.50–1.50)" in text
    assert "ddl, DDL_GROUP_SIZE=10 × all in one: 0.75 (0.75–0.75)" in text


def test_a_dag_processor_that_ends_is_told_of(tmp_path: Path) -> None:
    """Its log is gone with the benchmark's folder."""
    airflow = tmp_path / "python"
    airflow.write_text("#!/bin/sh\n[ $3 = db ] || seq 100 && echo no such bundle\n")
    airflow.chmod(0o755)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RuntimeError, match="0 of 1 DAGs stored") as caught,
    ):
        patch.setattr(sys, "executable", str(airflow))
        processor.measure(tmp_path / "home", {}, 1, 30, 1)
    assert "\n100\nno such bundle" in str(caught.value)
    assert "\n1\n" not in str(caught.value)


def test_ways_to_a_dag_are_compared_within_rounds() -> None:
    def samples(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": one, "cpu_s": one**2} for one in seconds]

    ours = {"whole": samples(1, 2), "own": samples(0.01, 0.01)}
    theirs = {"whole": samples(4, 10), "own": samples(1, 1)}
    measured = [
        {"count": 1000, "ways": {"loader": ours, "bundle": ours, "dag-factory": theirs}},
        {"count": 5000, "ways": {"loader": ours, "bundle": ours}},
    ]
    rows = dag_parse.make_rows(measured)
    text = dag_parse.table(rows, "whole").splitlines()
    assert text[0] == "| manifests | 1,000 | 5,000 |"
    assert text[2] == "| loader | 1.5 s | 1.5 s |"
    assert text[4:6] == ["| dag-factory | 7 s |  |", "| loader × dag-factory | 4.5 (4.2–4.8) |  |"]
    assert "| bundle × dag-factory | 100.0 (100.0–100.0) |  |" in dag_parse.table(rows, "own")
    by_cpu = dag_parse.table(dag_parse.make_rows(measured, "cpu_s"), "own")
    assert "| bundle × dag-factory | 10000.0 (10000.0–10000.0) |  |" in by_cpu


def test_manifests_of_the_benchmark_are_good(tmp_path: Path) -> None:
    folders.write_manifests(tmp_path, 3)
    manifests = [load_manifest(path) for path in sorted(tmp_path.glob("*/manifest.yml"))]
    assert [m.dag_id for m in manifests] == [folders.dag_id(number) for number in range(3)]
    assert not any(m.warnings for m in manifests)


def test_different_weights_end_a_training() -> None:
    same, other = {"weights": "a"}, {"weights": "b"}
    training.check({"ddl": [same, same], "apart": [same, other], "horovod": [same, same]}, 2)
    with pytest.raises(RuntimeError, match="horovod: the ranks' weights differ"):
        training.check({"ddl": [same, same], "horovod": [same, other]}, 2)
    with pytest.raises(RuntimeError, match="ddl and horovod"):
        training.check({"ddl": [same, same], "horovod": [other, other]}, 2)
    training.check({"ddl": [same, same], "horovod": [other, other]}, 3)  # sums have an order


def test_questions_are_measured_beside_one_that_is_none() -> None:
    """A word in front has ddl-airflow import that one's commands, and none all of them."""
    asked: list[list[str]] = []

    def ask(words: list[str], _environ: Mapping[str, str]) -> lineage_answers.Took:
        asked.append(words)
        return lineage_answers.Took(0.1, 0.1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lineage_answers, "ask", ask)
        patch.setattr(lineage_answers, "settle", lambda: None)
        lineage_answers.measure("/results", {}, 40, 1)
    assert {words[0] for words in asked} == {"lineage"}
    assert asked[-1] == ["lineage", "--help"]


RANK = """
import os
import subprocess
from benchmarks.turns import serve
rank = int(os.environ["RANK"])
def answer(request):
    if request.get("fail"):
        raise ValueError("as asked")
    return {"rank": rank}
serve(rank, {}, answer)
"""


def make_job() -> turns.Job:
    common = {"PYTHONPATH": str(report.REPOSITORY)}
    return turns.Job(
        "two",
        [[sys.executable, "-c", RANK]] * 2,
        2,
        [common | {"RANK": str(rank)} for rank in range(2)],
    )


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_who_is_not_at_turn_is_stopped_and_all_end() -> None:
    job = make_job()
    with turns.started([job]):
        pids = [greeting["pid"] for greeting in job.greetings]
        end = time.monotonic() + within(10)  # a signal arrives when it arrives
        while not all(map(is_stopped, pids)):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert [answer["rank"] for answer in job.ask({})] == [0, 1]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_fails_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job()
    with pytest.raises(RuntimeError, match="two: rank 0 gave no answer"), turns.started([job]):
        job.ask({"fail": True})
    assert "as asked" in capfd.readouterr().err


def test_mpis_are_compared_with_the_best_of_each_round() -> None:
    samples = {
        ("alltoall", 4, "reused"): {
            "ours": [1e-6, 2e-6],
            "Open MPI": [4e-6, 4e-6],
            "Intel MPI": [2e-6, 8e-6],
        },
        ("broadcast", 1 << 20, "fresh"): {
            "ours": [1e-3],
            "Open MPI": [2e-3],
            "Intel MPI": [3e-3],
        },
    }
    small, large = mpis.make_rows(samples)
    assert small["ours"]["ratio"] == 2  # of 2 / 1 and 4 / 2
    assert small["best peer"] == "Open MPI"
    assert (large["buffers"], large["ours"]["ratio"]) == ("fresh", 2)
    text = mpis.table([small, large], ["ours", "Open MPI", "Intel MPI"]).splitlines()
    assert text[0].endswith("| Intel MPI | best peer | ours × best peer |")
    assert text[2] == (
        "| alltoall | 4 B | reused | 1.5 us | 4 us | 5 us | Open MPI | 2.00 (2.00–2.00) |"
    )


def test_an_mpi_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the best peer of those that are left it would be another one, in the same words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpis, "PEERS", tmp_path)
        patch.setattr(mpis, "run", lambda arguments: print(arguments.peers) or 0)
        patch.setattr(sys, "argv", ["mpis"])
        assert mpis.main() == 1
        assert capsys.readouterr() == ("", "MPICH, Intel MPI: not in build/mpi: make bench-mpi\n")
        patch.setattr(sys, "argv", ["mpis", "--peers", "Open MPI"])
        assert mpis.main() == 0
        assert capsys.readouterr().out == "['Open MPI']\n"


def test_fresh_buffers_are_many_and_large_ones_fit_into_memory() -> None:
    assert mpis.buffers(4, "reused") == mpis.buffers(256 << 20, "reused") == 1
    assert mpis.buffers(4, "fresh") == mpis.buffers(1 << 20, "fresh") == 64
    assert mpis.buffers(256 << 20, "fresh") == 2


def test_all_mpis_can_be_measured(tmp_path: Path) -> None:
    missing = set(mpis.COLUMNS) - set(mpis.installed())
    if missing:
        pytest.skip(
            f"{' and '.join(sorted(missing))} not in build/mpi: make bench-mpi fetches them"
        )
    out = tmp_path / "out.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.collectives.mpis", "--ops", *OPS),
            *("--sizes", "4", "65536", "--rounds", "1", "--json", str(out)),
        ],
        env=os.environ | {"PYTHONPATH": str(report.REPOSITORY)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within(300),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(out.read_text())
    assert {"commit", "processor", "compiler", "ranks"} <= found.keys()
    assert "MPICH" in found["versions"]["MPICH"]
    assert "Intel(R) MPI" in found["versions"]["Intel MPI"]
    assert [(row["op"], row["bytes"], row["buffers"]) for row in found["rows"]] == [
        (op, nbytes, way) for op in OPS for nbytes in (4, 65536) for way in ("reused", "fresh")
    ]
    for row in found["rows"]:
        assert all(len(row[column]["samples_s"]) == 1 for column in mpis.COLUMNS)


class Copies:
    """As a program that brings objects, in so many seconds."""

    def __init__(self, name: str, *walls: float) -> None:
        self.name, self._walls = name, list(walls)

    def down(self, data: staging.Data, folder: Path, *, again: bool) -> dict[str, float]:
        place = folder / "data" if self.name == staging.OURS else folder
        place.mkdir(exist_ok=True)
        for number in range(data.count):
            (place / f"{number}.bin").write_bytes(bytes(data.nbytes))
        return {"wall_s": 1.0 if again else self._walls.pop(0), "cpu_s": 0.5}

    def up(self, data: staging.Data, folder: Path, prefix: str) -> dict[str, float]:
        assert (folder, prefix) == (Path("made"), "up-3-of-1024")
        return {"wall_s": self._walls.pop(0), "cpu_s": 0.25}


def test_the_way_up_is_compared_too_and_all_must_be_there() -> None:
    programs = [Copies("ours", 2.0, 4.0), Copies("a", 1.0, 8.0), Copies("b", 6.0, 4.0)]
    tiny = staging.TINY[0]
    rows = staging.measure_up(programs, tiny, Path("made"), 2, lambda prefix: [1024] * 3)
    assert staging.table(rows).splitlines()[2:] == [
        "| up, 3 × 1 KiB | 3.00 (0.25) | 4.50 (0.25) | 5.00 (0.25) | 0.75 (0.62–0.88) |"
    ]
    with pytest.raises(RuntimeError, match="ours: 2 objects, 2,048 bytes"):
        staging.measure_up([Copies("ours", 1.0)], tiny, Path("made"), 1, lambda prefix: [1024] * 2)


def test_staging_is_compared_with_the_best_peer_of_each_round(tmp_path: Path) -> None:
    programs = [Copies("ours", 2.0, 4.0), Copies("a", 2.0, 16.0), Copies("b", 6.0, 8.0)]
    rows = staging.measure(programs, staging.TINY[0], tmp_path, 2)
    assert rows[0]["best"]["ratio_quartiles"] == [1.25, 1.75]  # of 1 and 2
    assert staging.table(rows).splitlines()[2:] == [
        "| down, 3 × 1 KiB | 3.00 (0.50) | 9.00 (0.50) | 7.00 (0.50) | 1.50 (1.25–1.75) |",
        "| again, 3 × 1 KiB | 1.00 (0.50) | 1.00 (0.50) | 1.00 (0.50) | 1.00 (1.00–1.00) |",
    ]
    Copies("a", 1.0).down(staging.TINY[0], tmp_path, again=False)
    with pytest.raises(RuntimeError, match="3 objects came, 3,072 bytes"):
        staging._require_all(staging.SETS[0], tmp_path)


def test_weights_that_differ_are_found_with_their_case(tmp_path: Path) -> None:
    def leave(name: str, rank: int, end: list[float]) -> None:
        arrays = {"begin0": np.zeros(2), "begin1": np.ones(1), "end0": end, "end1": [1.0]}
        np.savez(tmp_path / f"{name}-{rank}.npz", **arrays)

    for rank in range(2):
        leave("fit, SGD", rank, [1.0, 2.0])
        leave("fit, fp16", rank, [1.0, 2.0])
    theirs = horovod_weights.read(tmp_path, 2)
    leave("fit, SGD", 1, [1.0, 2.0 + 2e-6])
    leave("fit, fp16", 0, [1.0, 2.0 + 2e-6])
    ours = horovod_weights.read(tmp_path, 2)
    rows = horovod_weights.compare(theirs, {"Keras 3": ours, "Keras 2": {}})
    assert [row["moved"] for row in rows] == [2.0, 2.0]
    found = [(row["name"], horovod_weights.above(row, "Keras 3")) for row in rows]
    assert found == [("fit, SGD", True), ("fit, fp16", False)]
    assert all(horovod_weights.above(row, "Keras 2") for row in rows)  # has not run
    ways = ("Keras 3", "Keras 2")
    assert "| fit, SGD | 2e-06 | not run | 2 |" in horovod_weights.table({2: rows}, ways)
    leave("fit, SGD", 0, [math.nan, 2.0])
    row, _ = horovod_weights.compare(theirs, {"Keras 3": horovod_weights.read(tmp_path, 2)})
    assert horovod_weights.above(row, "Keras 3")


def outcome(**more):
    usual = {"tool": "ours", "way": "up", "fault": "500", "index": 0, "end": "right"}
    usual |= {"left": False, "orphan": False, "took_s": 1.0, "said": ""}
    return faults.Outcome(**usual | more)


@pytest.mark.parametrize(
    ("code", "said", "came", "end", "left"),
    [
        (0, "", b"right", "right", False),
        (0, "", b"wrong", "silent", False),
        (0, "", None, "silent", False),
        (1, "a/f.bin: InternalError (500)", None, "clear", False),
        (1, "a/f.bin: InternalError (500)", b"wrong", "clear", True),
        (1, "InternalError (500)", None, "unclear", False),
        (1, "a/f.bin: it failed", None, "unclear", False),
        (None, "", None, "hung", False),
    ],
)
def test_what_came_of_a_fault_is_judged_by_the_bytes_and_by_what_was_said(
    code, said, came, end, left
):
    there = {} if came is None else {"f.bin": came}
    judged = faults.Bench._judged(
        *(outcome(end=""), code, said, {"f.bin": b"right"}, {}, there, faults.UP["500"], "")
    )
    assert (judged.end, judged.left) == (end, left)


def test_one_that_was_replaced_is_one_or_the_other_and_no_mixture():
    for came, end in ((b"old", "right"), (b"new", "right"), (b"nld", "silent")):
        judged = faults.Bench._judged(
            *(outcome(end=""), 0, "", {"f": b"old"}, {"f": b"new"}, {"f": came}, "", "")
        )
        assert judged.end == end


def test_the_table_of_faults_has_what_is_bad_in_bold():
    runs = [
        outcome(),
        outcome(end="silent"),
        outcome(end="clear", left=True, orphan=True),
        outcome(tool="s5cmd", fault="sent cut"),
    ]
    table = faults.tables(runs, ["ours", "s5cmd"])
    bad = "**1 silent damage**, **1 wrong file left**, **1 upload left**"
    assert f"| 500 | 1 right, 1 clear failure, {bad} |  |" in table
    assert "| end while the body is sent |  | 1 right |" in table


def test_the_page_of_faults_is_made_and_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "PAGE", tmp_path / "page.md")
    faults.write_page("first \\1")
    faults.write_page("second \\1")
    text = faults.PAGE.read_text()
    assert "second \\1" in text and "first" not in text and text.count("<!-- measured -->") == 1

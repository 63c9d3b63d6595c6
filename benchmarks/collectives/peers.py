"""Measures collectives through TensorFlow against Horovod and gloo. See README.md."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks import environments, report, turns
from benchmarks.collectives.__main__ import OPS
from benchmarks.collectives.gradient_sets import GRADIENT_SETS

SIZES = [4, *(1024 << 2 * i for i in range(10))]  # 4 B, 1 KiB to 256 MiB
BASELINE = "horovod"
# What each column measures: a job, and the way it is asked for.
COLUMNS = {
    "ddl": ("ddl, TensorFlow 2.15", "ddl"),
    "mpi": ("ddl, TensorFlow 2.15", "mpi"),
    "ddl, TF 2.21": ("ddl", "ddl"),
    "horovod": ("horovod", "horovod"),
    "horovod, 0.1 ms": ("horovod, cycle of 0.1 ms", "horovod"),
    "gloo": ("gloo", "gloo"),
}
# Those that do more than allreduce.
WHOLE_COLUMNS = ["ddl", "ddl, TF 2.21", "horovod", "horovod, 0.1 ms"]
SET_COLUMNS = COLUMNS | {"horovod grouped": ("horovod", "horovod_grouped")}

# glibc gives large blocks back at once and takes new ones, whose first touch costs more than the
# collective: 50 ms for 64 MiB where the machine is virtual. With this it keeps them.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_ARENA_MAX": "1",
}

_MODULE = ["-m", "benchmarks.collectives.peer_rank"]

_CHAIN = 16
_CHAIN_BYTES = 4 << 20  # together; above it a collective is long beside TensorFlow's call
_EXACT = 1 << 24  # float32 has all integers up to here
_SAMPLE_S = 0.1
_MOST_CALLS = 300  # by then the quickest are warm


def chain_length(nbytes: int, ranks: int) -> int:
    """How many sums follow each other in one function: each must stay exact."""
    if ranks == 1:
        return _CHAIN
    exact = 1 + int(math.log(_EXACT / (9 * ranks + ranks * ranks), ranks))
    return max(1, min(_CHAIN, _CHAIN_BYTES // nbytes, exact))


def make_jobs(
    ranks: int, wanted: list[str], pairs: bool, memory: dict[str, str], folder: Path
) -> dict[str, turns.Job]:
    """The jobs of the columns `wanted`; installs what they need first.

    With `pairs` there are process sets of two. `memory` goes into the environment of each, and
    `folder` is where their ranks may meet.
    """
    needed = {SET_COLUMNS[column][0] for column in wanted}
    jobs = {}

    def under_mpirun(name: str, peer: str, where: environments.Environment, **more: str) -> None:
        command = [*turns.mpirun(where.python, ranks), str(where.python), *_MODULE, peer]
        command += ["pairs"] * pairs
        variables = where.variables() | turns.MPI_ENVIRONMENT | memory | more
        jobs[name] = turns.Job(name, [command], ranks, [variables])

    if "ddl, TensorFlow 2.15" in needed:
        under_mpirun("ddl, TensorFlow 2.15", "ddl", environments.horovod())
    if "horovod" in needed:
        under_mpirun("horovod", "horovod", environments.horovod_alone())
    if "horovod, cycle of 0.1 ms" in needed:
        name = "horovod, cycle of 0.1 ms"
        under_mpirun(name, "horovod", environments.horovod_alone(), HOROVOD_CYCLE_TIME="0.1")
    if "ddl" in needed:
        under_mpirun("ddl", "ddl", environments.ours())
    if "gloo" in needed:
        gloo = environments.gloo()
        common = (
            gloo.variables()
            | memory
            | {
                "WORLD_SIZE": str(ranks),
                "GLOO_FILE": str(folder / "gloo"),
                "GLOO_SOCKET_IFNAME": "lo",
            }
        )
        commands = [[str(gloo.python), *_MODULE, "gloo"] for _ in range(ranks)]
        variables = [common | {"RANK": str(rank)} for rank in range(ranks)]
        jobs["gloo"] = turns.Job("gloo", commands, ranks, variables)
    return jobs


def has(column: str, case: dict[str, Any]) -> bool:
    """Whether a column measures a case."""
    if "set" in case:
        return True
    if case["op"] != "allreduce" or case["pairs"]:
        return column in WHOLE_COLUMNS
    return column in COLUMNS


def measure(
    jobs: dict[str, turns.Job], cases: list[dict[str, Any]], columns: list[str], rounds: int
) -> list[dict[str, list[float]]]:
    """For each case, seconds of a call by column: one sample a round, of the slowest rank."""
    calls: dict[tuple[int, str], int] = {}
    samples: list[dict[str, list[float]]] = [defaultdict(list) for _ in cases]
    for round_number in range(rounds + 1):
        for number, case in enumerate(cases):
            # Nobody always follows the same one.
            first = round_number % len(columns)
            for column in columns[first:] + columns[:first]:
                if not has(column, case):
                    continue
                job, way = SET_COLUMNS[column]
                request = case | {"way": way, "calls": calls.get((number, column), 1)}
                seconds = max(answer["seconds"] for answer in jobs[job].ask(request))
                if round_number == 0:  # tells how many calls make a sample
                    wanted = math.ceil(_SAMPLE_S / seconds)
                    calls[number, column] = min(_MOST_CALLS, wanted)
                else:
                    samples[number][column].append(seconds)
    return samples


def make_rows(
    cases: list[dict[str, Any]], samples: list[dict[str, list[float]]], baseline: str
) -> list[dict[str, Any]]:
    """A row for each case: time and ratio to the baseline of each column."""
    rows = []
    for case, columns in zip(cases, samples, strict=True):
        row = dict(case)
        for column, seconds in columns.items():
            row[column] = report.compare(seconds, columns[baseline])
        rows.append(row)
    return rows


def case_text(case: dict[str, Any]) -> str:
    """A case in a few letters."""
    if "set" in case:
        shapes = GRADIENT_SETS[case["set"]]()
        nbytes = 4 * sum(map(math.prod, shapes))
        return f"{case['set']}: {len(shapes)} tensors, {nbytes / 1e6:.1f} MB"
    text = f"{case['op']}, {report.size_text(case['nbytes'])}"
    if case["pairs"]:
        text += ", two at once"
    return text if case["chain"] == 1 else f"{text}, of {case['chain']}"


def table(rows: list[dict[str, Any]], columns: list[str], baseline: str) -> str:
    """The rows as a Markdown table: time for each collective, and ratio to the baseline."""
    ratios = [column for column in columns if column not in (baseline, "horovod grouped")]
    lines = [
        "| | " + " | ".join([*columns, *(f"{c} × {baseline}" for c in ratios)]) + " |",
        "|---" * (1 + len(columns) + len(ratios)) + "|",
    ]
    for row in rows:
        cells = [case_text(row)]
        for column in columns:
            seconds = row[column]["median_s"] / row.get("chain", 1) if column in row else None
            cells.append(report.time_text(seconds) if seconds else "")
        for column in ratios:
            if column not in row:
                cells.append("")
                continue
            low, high = row[column]["ratio_quartiles"]
            cells.append(f"{row[column]['ratio']:.1f} ({low:.1f}–{high:.1f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """The command. Returns 0; raises RuntimeError if a result was wrong or a rank failed."""
    ranks, pairs = arguments.ranks, arguments.pairs
    members = 2 if pairs else ranks
    cases: list[dict[str, Any]] = [
        {"op": op, "nbytes": nbytes, "chain": chain, "pairs": pairs}
        for op in arguments.ops
        for nbytes in arguments.sizes
        for chain in sorted({1, chain_length(nbytes, members)})
    ]
    if "allreduce" in arguments.ops and not pairs:
        cases += [{"set": name} for name in arguments.sets]
    columns = [one for one in arguments.columns if any(has(one, case) for case in cases)]
    memory = {} if arguments.fresh_memory else _KEEP_MEMORY
    about = report.about()
    with tempfile.TemporaryDirectory() as folder:
        jobs = make_jobs(ranks, columns, pairs, memory, Path(folder))
        with turns.started(list(jobs.values())):
            samples = measure(jobs, cases, columns, arguments.rounds)
    baseline = BASELINE if BASELINE in columns else columns[0]
    rows = make_rows(cases, samples, baseline)
    versions = {name: job.greetings[0]["versions"] for name, job in jobs.items()}
    print(report.about_text(about))
    print(f"{ranks} ranks, {arguments.rounds} rounds; " + json.dumps(versions))
    print(table(rows, columns, baseline))
    if arguments.json:
        about |= {"ranks": ranks, "rounds": arguments.rounds, "versions": versions, "rows": rows}
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


def main() -> int:
    parser = report.argument_parser("Measures collectives through TensorFlow.", 9, "case")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS[:1])
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes")
    parser.add_argument("--sets", nargs="*", choices=GRADIENT_SETS, default=list(GRADIENT_SETS))
    parser.add_argument("--columns", nargs="+", choices=SET_COLUMNS, default=list(SET_COLUMNS))
    parser.add_argument(
        "--fresh-memory",
        action="store_true",
        help="let glibc return memory between calls, as it does by default",
    )
    parser.add_argument(
        "--pairs",
        action="store_true",
        help="process sets of ranks 0 and 1, 2 and 3, ..., all at the same time",
    )
    arguments = parser.parse_args()
    if arguments.pairs and (arguments.ranks < 4 or arguments.ranks % 2):
        parser.error(f"--pairs needs --ranks 4 or another even number, not {arguments.ranks}")
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Measures collectives below TensorFlow against the best of three MPIs. See README.md."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import environments, report, turns
from benchmarks.collectives.__main__ import LAYERS, OPS, SIZES

HERE = Path(__file__).resolve().parent
# Where `make bench-mpi` puts requirements/mpich.txt and requirements/impi.txt.
PEERS = report.REPOSITORY / "build" / "mpi"

OURS = "ours"
OPEN_MPI = "Open MPI"
# Those that are not in our environment: the folder of each in PEERS.
FOLDERS = {"MPICH": "mpich", "Intel MPI": "impi"}
COLUMNS = [OURS, OPEN_MPI, *FOLDERS]
WAYS = ["reused", "fresh"]

_SAMPLE_S = 0.05
_MOST_CALLS = 20_000
# Fresh buffers: so many that together they are in no cache, where the tensor is not tiny.
_POOL_BYTES = 64 << 20
_MOST_BUFFERS = 64


@dataclass(frozen=True)
class Mpi:
    """How one MPI library compiles and starts the ranks."""

    name: str
    compile_flags: list[str]
    link_flags: list[str]
    command: list[str]
    environ: dict[str, str]


def installed() -> list[str]:
    """The columns that can be measured here: `make bench-mpi` installs all."""
    return [
        name
        for name in COLUMNS
        if name not in FOLDERS or (PEERS / FOLDERS[name] / "bin" / "mpiexec.hydra").exists()
    ]


def hydra(name: str, ranks: int) -> Mpi:
    """MPICH, or Intel MPI, which needs to be told where it is."""
    folder = PEERS / FOLDERS[name]
    library = folder / "lib"
    environ = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    if name == "Intel MPI":
        environ |= {
            "I_MPI_ROOT": str(folder),
            "LD_LIBRARY_PATH": str(library),
            "I_MPI_FABRICS": "shm",  # of this host alone: its other one needs a libfabric
        }
        if ranks > len(os.sched_getaffinity(0)):
            # Else a rank that waits keeps its core from one that works.
            environ |= {"I_MPI_PIN": "0", "I_MPI_THREAD_YIELD": "2"}
    return Mpi(
        name,
        [f"-I{folder / 'include'}"],
        [f"-L{library}", "-lmpi", f"-Wl,-rpath,{library}"],
        [str(folder / "bin" / "mpiexec.hydra"), "-n", str(ranks)],
        environ,
    )


def make_jobs(columns: list[str], ranks: int, folder: Path) -> tuple[dict[str, turns.Job], str]:
    """The jobs that `columns` need, by MPI, compiled into `folder`; and what compiled them."""
    build = environments.load_build()
    tools = build.find_toolchain()
    libraries = [flag[2:] for flag in tools.mpi_link_flags if flag.startswith("-L")]
    objects = build.compile_objects(tools, layers=LAYERS)
    wanted = [
        Mpi(
            OPEN_MPI,
            [*tools.mpi_flags, "-DDDL_OURS"],
            [
                *map(str, objects),
                *(*tools.mpi_link_flags, *(f"-Wl,-rpath,{place}" for place in libraries)),
                "-ldl",
            ],
            turns.mpirun(Path(sys.executable), ranks),
            turns.MPI_ENVIRONMENT,
        )
    ]
    wanted += [hydra(name, ranks) for name in FOLDERS if name in columns]
    sources = ["-I" + str(report.REPOSITORY / "ops_lib" / "cc"), str(HERE / "mpi_rank.cc")]
    jobs = {}
    for number, mpi in enumerate(wanted):
        library = folder / f"mpi{number}.so"
        subprocess.run(
            [
                *(*tools.compiler, "-std=c++17", "-O2", "-pthread", "-shared", "-fPIC"),
                *(*mpi.compile_flags, *sources, *mpi.link_flags, "-o", str(library)),
            ],
            check=True,
        )
        rank = [sys.executable, "-m", "benchmarks.collectives.mpi_rank", str(library)]
        environ = {"PYTHONPATH": str(report.REPOSITORY)} | mpi.environ
        jobs[mpi.name] = turns.Job(mpi.name, [[*mpi.command, *rank]], ranks, [environ])
    return jobs, tools.compiler_version


def buffers(nbytes: int, way: str) -> int:
    """How many pairs of input and output the calls go round."""
    if way == "reused":
        return 1
    return max(2, min(_MOST_BUFFERS, _POOL_BYTES // nbytes))


Case = tuple[str, int, str]  # op, bytes, way


def measure(
    jobs: dict[str, turns.Job], ops: list[str], sizes: list[int], columns: list[str], rounds: int
) -> dict[Case, dict[str, list[float]]]:
    """By case, seconds of a call by column: a sample a round, of the slowest rank."""
    calls: dict[tuple[Case, str], int] = {}
    samples: dict[Case, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for round_number in range(rounds + 1):
        for case in itertools.product(ops, sizes, WAYS):
            op, nbytes, way = case
            # Nobody always follows the same one.
            first = round_number % len(columns)
            for column in columns[first:] + columns[:first]:
                request = {
                    "op": op,
                    "ours": int(column == OURS),
                    "nbytes": nbytes,
                    "calls": calls.get((case, column), 3),
                    "buffers": buffers(nbytes, way),
                }
                job = jobs[OPEN_MPI if column == OURS else column]
                seconds = max(answer["seconds"] for answer in job.ask(request))
                if round_number == 0:  # tells how many calls make a sample
                    number = max(1, min(_MOST_CALLS, math.ceil(_SAMPLE_S / seconds)))
                    calls[case, column] = number
                else:
                    samples[case][column].append(seconds)
    return samples


def make_rows(samples: dict[Case, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """A row for each case: each column beside the best peer of the same round."""
    rows = []
    for (op, nbytes, way), columns in samples.items():
        peers = [column for column in columns if column != OURS]
        best = [min(times) for times in zip(*(columns[peer] for peer in peers), strict=True)]
        row: dict[str, Any] = {"op": op, "bytes": nbytes, "buffers": way}
        for column, seconds in columns.items():
            row[column] = report.compare(seconds, best)
        row["best peer"] = min(peers, key=lambda peer: row[peer]["median_s"])
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """The rows as a Markdown table: median of each column, and ours × the best peer."""
    heads = ["op", "size", "buffers", *columns, "best peer", "ours × best peer"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        low, high = row[OURS]["ratio_quartiles"]
        cells = [
            row["op"],
            report.size_text(row["bytes"]),
            row["buffers"],
            *(report.time_text(row[column]["median_s"]) for column in columns),
            row["best peer"],
            f"{row[OURS]['ratio']:.2f} ({low:.2f}–{high:.2f})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """The command. Returns 0; raises RuntimeError if a result was wrong or a rank failed."""
    columns = [OURS, *(column for column in arguments.peers)]
    about = report.about()
    with tempfile.TemporaryDirectory() as folder:
        jobs, compiler = make_jobs(columns, arguments.ranks, Path(folder))
        with turns.started(list(jobs.values())):
            samples = measure(jobs, arguments.ops, arguments.sizes, columns, arguments.rounds)
    rows = make_rows(samples)
    about |= {
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "compiler": compiler,
        "versions": {name: job.greetings[0]["versions"]["MPI"] for name, job in jobs.items()},
    }
    print(report.about_text(about))
    print(f"{arguments.ranks} ranks, {arguments.rounds} rounds; {json.dumps(about['versions'])}")
    print(table(rows, columns))
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


def main() -> int:
    parser = report.argument_parser("Measures collectives against three MPIs.", 9, "size")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS[:1])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    peers = [column for column in COLUMNS if column != OURS]
    parser.add_argument("--peers", nargs="+", choices=peers, default=peers)
    arguments = parser.parse_args()
    there = installed()
    if missing := [peer for peer in arguments.peers if peer not in there]:
        print(f"{', '.join(missing)}: not in build/mpi: make bench-mpi", file=sys.stderr)
        return 1
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())

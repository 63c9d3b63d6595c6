"""Measures allreduce below TensorFlow: `python -m benchmarks.collectives`. See README.md."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments, report, turns

HERE = Path(__file__).resolve().parent
SOURCES = report.REPOSITORY / "ops_lib" / "cc"

SIZES = [4 << 2 * i for i in range(14)]  # 4 B to 256 MiB
# What mpis.py and peers.py measure; this one measures the first.
OPS = ["allreduce", "allgather", "reducescatter", "alltoall", "broadcast"]
BASELINE = "MPI_Allreduce"
LAYERS = ("core", "transport", "algorithms", "comm", "runtime")
BOUND = "stream-copy"


def compile_driver(program: Path, source: Path = HERE / "driver.cc") -> dict[str, str]:
    """Compiles it and links the library's objects below tf/. Returns what built it."""
    build = environments.load_build()
    tools = build.find_toolchain()
    objects = build.compile_objects(tools, layers=LAYERS)
    libraries = [flag[2:] for flag in tools.mpi_link_flags if flag.startswith("-L")]
    subprocess.run(
        [
            *(*tools.compiler, "-std=c++17", "-O2", "-pthread", f"-I{SOURCES}", *tools.mpi_flags),
            *map(str, [source, *objects]),
            *(*tools.mpi_link_flags, *(f"-Wl,-rpath,{folder}" for folder in libraries)),
            *("-ldl", "-o", str(program)),
        ],
        check=True,
    )
    return {"compiler": tools.compiler_version}


def start_ranks(program: Path, ranks: int, words: Sequence[int | str]) -> str:
    """The program's lines. Raises CalledProcessError if a result was wrong or a rank failed."""
    command = [*turns.mpirun(Path(sys.executable), ranks), str(program)]
    done = subprocess.run(
        [*command, *map(str, words)],
        env=os.environ | turns.MPI_ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def summarise(lines: list[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Machine's bandwidths in bytes/s by name, and one row for each size.

    A ratio is taken within each round, where both were measured within milliseconds. So is the
    share of the bound, of the sizes that have one.
    """
    machine: dict[str, float] = {}
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    for line in lines:
        first, second, *rest = line.split()
        if first == "#":
            machine[f"{second} {rest[0]}"] = float(rest[1])
        else:
            samples[first, int(second)].append(float(rest[0]))
    rows = []
    for nbytes in sorted({nbytes for _, nbytes in samples}):
        row: dict[str, Any] = {"bytes": nbytes}
        if copies := samples.get((BOUND, nbytes)):
            pairs = zip(samples["shm", nbytes], copies, strict=True)
            row["of_bound"] = statistics.median(copy / shm for shm, copy in pairs)
            row[BOUND] = {"samples_s": copies}
        baseline = samples[BASELINE, nbytes]
        for what in ("shm", "mpi", BASELINE):
            seconds = samples[what, nbytes]
            row[what] = report.compare(seconds, baseline)
            row[what]["algbw"] = nbytes / row[what]["median_s"]
        rows.append(row)
    return machine, rows


def table(rows: list[dict[str, Any]], ranks: int) -> str:
    """The rows as text. Bound: see README.md."""
    lines = [
        f"{'size':>8}  {'shm us':>11} {'mpi us':>11} {'MPI us':>11}  {'shm GB/s':>8} "
        f"{'busbw':>7} {'of bound':>8}  {'shm x MPI (quartiles)':>23}  {'best':>5}  "
        f"{'mpi x MPI':>9}"
    ]
    for row in rows:
        shm, mpi, plain = row["shm"], row["mpi"], row[BASELINE]
        busbw = shm["algbw"] * 2 * (ranks - 1) / ranks
        low, high = shm["ratio_quartiles"]
        share = f"{row['of_bound']:8.0%}" if "of_bound" in row else f"{'':8}"
        lines.append(
            f"{report.size_text(row['bytes']):>8}  {shm['median_s'] * 1e6:11.2f} "
            f"{mpi['median_s'] * 1e6:11.2f} {plain['median_s'] * 1e6:11.2f}  "
            f"{shm['algbw'] / 1e9:8.2f} {busbw / 1e9:7.2f} {share}  "
            f"{shm['ratio']:7.2f} ({low:6.2f} {high:6.2f})  "
            f"{plain['best_s'] / shm['best_s']:5.2f}  {mpi['ratio']:9.2f}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = report.argument_parser("Measures allreduce below TensorFlow.", 15, "size")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "driver"
        built_with = compile_driver(program)
        about = report.about()
        output = start_ranks(program, arguments.ranks, [arguments.rounds, *arguments.sizes])
    machine, rows = summarise(output.splitlines())
    about |= {
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        **built_with,
        "bytes_per_s": machine,
    }
    print(report.about_text(about))
    print(
        "one thread, GB/s: "
        + ", ".join(f"{name} {value / 1e9:.1f}" for name, value in machine.items() if value)
    )
    print(table(rows, arguments.ranks))
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

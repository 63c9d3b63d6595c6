"""Measures allreduce between hosts: `python -m benchmarks.collectives.hosts`. See README.md.

The hosts are network namespaces of this machine, so it needs root.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks import report
from benchmarks.collectives.__main__ import compile_driver
from tests.integration.hosts import Hosts, available

BASELINE = "MPI_Allreduce"
SIZES = [4 << 2 * i for i in range(5, 13)]  # 4 KiB to 64 MiB


def main() -> int:
    parser = report.argument_parser("Measures allreduce between hosts.", 7, "size")
    parser.add_argument("--hosts", type=int, default=2, help="each with --ranks")
    parser.add_argument("--rate", help="what a host sends at most, as tc has it: 1gbit")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    arguments = parser.parse_args()
    if reason := available():
        print(reason, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "driver"
        compile_driver(program, Path(__file__).with_name("hosts.cc"))
        with Hosts(Path(folder) / "hosts", arguments.hosts) as hosts:
            if arguments.rate:
                hosts.limit(arguments.rate)
            words = [str(program), str(arguments.rounds), *map(str, arguments.sizes)]
            # The hosts share this machine's cores, which MPI does not know: without this its ranks
            # spin while others have work to do, and it looks worse than it is.
            options = ["--mca", "mpi_yield_when_idle", "1"]
            done = subprocess.run(
                hosts.mpirun([arguments.ranks] * arguments.hosts, words, options),
                env=os.environ | hosts.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
    samples: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in done.stdout.splitlines():
        way, nbytes, seconds, _ = line.split()
        samples[int(nbytes)][way].append(float(seconds))
    print("median us of a call, and how many times faster than MPI_Allreduce (median over rounds)")
    for nbytes, ways in samples.items():
        cells = [f"{nbytes:>9}"]
        for way, seconds in ways.items():
            ratios = [b / s for s, b in zip(seconds, ways[BASELINE], strict=True)]
            cells.append(
                f"{way} {statistics.median(seconds) * 1e6:.0f} ({statistics.median(ratios):.2f})"
            )
        print("  ".join(cells))
    if arguments.json:
        about = {
            "hosts": arguments.hosts,
            "ranks": arguments.ranks,
            "rate": arguments.rate,
            "samples_s": samples,
        }
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

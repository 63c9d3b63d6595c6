"""Measures how allreduce and training scale over hosts, beside what the model says of them.

`python -m benchmarks.scaling`; see README.md. The hosts are network namespaces of this machine, so
it needs root.
"""

from __future__ import annotations

import argparse
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

from benchmarks import environments, report
from benchmarks.collectives.__main__ import compile_driver
from benchmarks.scaling.chart import draw
from benchmarks.scaling.compared import Case, compare, table
from benchmarks.scaling.model import KIB, MIB, Layout
from tests.integration.hosts import Hosts, available

SIZES = [64 * KIB, MIB, 16 * MIB, 64 * MIB]
RATES = ["none", "1gbit", "100mbit"]
HOSTS = 3
LAYOUTS = [Layout(1, 2), Layout(2, 1), Layout(3, 1), Layout(2, 2), Layout(3, 2)]
TRAININGS = [Layout(1, 1), Layout(1, 2), Layout(2, 1), Layout(3, 1), Layout(2, 2)]
MODEL, BATCH = "mnist", 100


def run(hosts: Hosts, layout: Layout, words: Sequence[str], extra: dict[str, str]) -> str:
    """What rank 0 prints. Raises CalledProcessError if a result was wrong or a rank failed."""
    slots = [layout.slots if host < layout.hosts else 0 for host in range(HOSTS)]
    # The hosts share this machine's cores: ranks that wait should leave them to the others.
    options = ["--mca", "mpi_yield_when_idle", "1"]
    options += [word for name in extra for word in ("-x", name)]
    done = subprocess.run(
        hosts.mpirun(slots, words, options),
        env=os.environ | hosts.environment | extra,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


def allreduces(hosts: Hosts, program: Path, rate: str, sizes: list[int], rounds: int) -> list[Case]:
    """All layouts at one rate."""
    cases = []
    for layout in LAYOUTS:
        if layout.hosts == 1 and rate != "none":
            continue  # nothing of it is on a link
        ways = ["ours"] if layout.slots == 1 or layout.hosts == 1 else ["ours", "flat"]
        words = [str(program), str(rounds), *map(str, sizes), *ways]
        found: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
        for line in run(hosts, layout, words, {}).splitlines():
            way, nbytes, *numbers = line.split()
            found[way, int(nbytes)].append([float(number) for number in numbers])
        for (way, nbytes), samples in found.items():
            at = Layout(layout.hosts, layout.slots, way == "ours")
            seconds, sent = zip(*samples, strict=True)
            cases.append(
                Case("allreduce", rate, at, nbytes, list(seconds), statistics.median(sent))
            )
    return cases


def trainings(hosts: Hosts, rate: str, steps: int, rounds: int) -> list[Case]:
    """A training on each of TRAININGS, at one rate."""
    where = environments.ours()
    extra = where.variables() | {"DDL_OPTIONS": ""}
    words = [str(where.python), "-m", "benchmarks.scaling.train_rank", MODEL, str(BATCH)]
    cases = []
    for layout in TRAININGS:
        if layout.hosts == 1 and rate != "none":
            continue
        statistics_file = hosts.folder / "statistics.json"
        extra["DDL_STATS"] = str(statistics_file)
        before = max(hosts.sent_bytes())
        output = run(hosts, layout, [*words, str(steps), str(rounds)], extra)
        sent = max(hosts.sent_bytes()) - before
        lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
        seconds = [float(line[1]) for line in lines]
        nbytes = int(lines[0][2])
        # A sample has one step more than it times, and there is a sample more; the rest is setup.
        done = (steps + 1) * (rounds + 1)
        ranks = json.loads(statistics_file.read_text())["ranks"]
        reduced = statistics.median((rank["comm_s"] - rank["wait_s"]) / done for rank in ranks)
        cases.append(Case("training", rate, layout, nbytes, seconds, sent / done, reduced))
    return cases


def measure(arguments: argparse.Namespace) -> list[Case]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "driver"
        compile_driver(program, report.REPOSITORY / "benchmarks" / "collectives" / "hosts.cc")
        cases = []
        with Hosts(Path(folder) / "hosts", HOSTS) as hosts:
            for rate in arguments.rates:
                print(f"links: {rate}", file=sys.stderr, flush=True)
                if rate != "none":
                    hosts.limit(rate)
                cases += allreduces(hosts, program, rate, arguments.sizes, arguments.rounds)
                if arguments.steps:
                    cases += trainings(hosts, rate, arguments.steps, arguments.rounds)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="samples of each case")
    parser.add_argument("--rates", nargs="+", default=RATES, help="as tc has them; none first")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, two or more")
    parser.add_argument("--steps", type=int, default=5, help="of training in a sample; 0: none")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    parser.add_argument("--svg", type=Path, help="where to draw it")
    parser.add_argument("--from", type=Path, dest="given", help="JSON in place of measuring")
    arguments: Any = parser.parse_args()
    if arguments.given:
        found = json.loads(arguments.given.read_text())
        about, cases = found["about"], [Case.of(one) for one in found["cases"]]
    else:
        if reason := available():
            print(reason, file=sys.stderr)
            return 1
        about = report.about()
        cases = measure(arguments)
    rows, links = compare(cases, about["cores"])
    print(report.about_text(about))
    for rate, link in links.items():
        print(
            f"{rate}: {link.message_s * 1e6:.0f} us a message, {link.bytes_per_s / 1e6:.1f} MB/s"
            + (", which all hosts share" if link.shared else "")
        )
    print(table(rows))
    if arguments.json:
        text = json.dumps({"about": about, "cases": [case.as_json() for case in cases]}, indent=1)
        arguments.json.write_text(text + "\n")
    if arguments.svg:
        arguments.svg.write_text(draw(rows), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

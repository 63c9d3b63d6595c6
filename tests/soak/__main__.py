"""`python -m tests.soak`: a hundred thousand collectives, two hundred kills. See README.md."""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.soak.collectives import soak
from tests.soak.driver import compile_driver
from tests.soak.kills import Killed, kills
from tests.soak.large import CASES, free_bytes, large


def run_collectives(program: Path, arguments: argparse.Namespace) -> int:
    """Returns the number of faults."""
    faults = []
    for ranks in arguments.ranks:
        for transport in arguments.transports:
            start = time.monotonic()
            soaked = soak(
                program,
                ranks=ranks,
                transport=transport,
                collectives=arguments.collectives,
                seed=arguments.seed,
                shuffle=arguments.shuffle,
                wrong=arguments.wrong,
                timeout_s=3600,
            )
            seconds = time.monotonic() - start
            found = soaked.faults(ranks)
            faults += found
            print(f"{ranks} ranks, {transport}: {seconds:.0f} s, {len(found)} faults")
            for one in soaked.ranks:
                print(
                    f"  rank {one.rank}: {one.collectives} collectives, {one.mistakes} wrong on "
                    f"purpose, {one.elements:.3g} elements checked; "
                    f"KiB {one.kib[0]} -> {one.kib[1]}, files {one.files[0]} -> {one.files[1]}"
                )
            print("".join(f"  FAULT: {text}\n" for text in found), end="", flush=True)
    return len(faults)


def table(tried: list[Killed]) -> str:
    """How long the ends of the other ranks took, and how they ended."""
    groups: dict[tuple[str, ...], list[Killed]] = defaultdict(list)
    for one in tried:
        groups[one.transport, "no help" if one.alone else "mpirun", one.phase].append(one)
    lines = [
        "| transport | who ends them | moment | kills | median | most | how |",
        "|---" * 7 + "|",
    ]
    for key, members in sorted(groups.items()):
        seconds = [s for one in members for s in one.seconds.values()] or [0.0]
        ends = Counter(end for one in members for end in one.ends.values())
        how = ", ".join(f"{end}: {count}" for end, count in ends.most_common())
        lines.append(
            f"| {' | '.join(key)} | {len(members)} | {statistics.median(seconds):.2f} s "
            f"| {max(seconds):.2f} s | {how} |"
        )
    return "\n".join(lines)


def run_kills(program: Path, arguments: argparse.Namespace) -> int:
    """Returns the number of faults."""
    tried = []
    for one in kills(program, arguments.kills, arguments.seed):
        tried.append(one)
        for fault in one.faults:
            print(
                f"  FAULT: kill {len(tried)} ({one.ranks} ranks, {one.transport}, {one.phase}, "
                f"alone={one.alone}, rank {one.victim}): {fault}",
                flush=True,
            )
    print(table(tried))
    return sum(len(one.faults) for one in tried)


def run_large(program: Path, arguments: argparse.Namespace) -> int:
    """Returns the number of faults."""
    faults = 0
    for kind, dtype, count, nbytes in CASES:
        for transport in arguments.transports:
            name = f"{kind} of {count} {dtype}, {transport}"
            if free_bytes() < nbytes * 5 // 4:
                print(f"{name}: left out, needs {nbytes / 2**30:.0f} GiB of memory")
                continue
            start = time.monotonic()
            found = large(program, kind, dtype, count, transport)
            faults += len(found)
            print(f"{name}: {time.monotonic() - start:.0f} s, {len(found)} faults", flush=True)
            print("".join(f"  FAULT: {text}\n" for text in found), end="", flush=True)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--collectives", type=int, default=100_000, help="0: none")
    parser.add_argument("--kills", type=int, default=200, help="0: none")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--transports", nargs="+", default=["shm", "mpi"])
    parser.add_argument(
        "--wrong", type=int, default=50, help="1 in so many is wrong on purpose; 0: none"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the default: the time")
    parser.add_argument("--large", action="store_true", help="also more than 2^31 bytes; 8 GiB")
    parser.add_argument(
        "--shuffle", action="store_true", help="each rank submits in an order of its own"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that jobs are ended on the way out
    faults = 0
    with tempfile.TemporaryDirectory() as folder:
        program = compile_driver(Path(folder))
        print(f"seed {arguments.seed}", flush=True)
        if arguments.collectives:
            faults += run_collectives(program, arguments)
        if arguments.kills:
            faults += run_kills(program, arguments)
        if arguments.large:
            faults += run_large(program, arguments)
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

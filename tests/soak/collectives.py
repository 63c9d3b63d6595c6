"""Many random collectives, each element checked: zero wrong results and flat memory."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.soak.driver import clean_environment, mpirun_command

# What the resident memory of a rank may grow by from the first quarter to the last. Over 75,000
# collectives that shows a leak of 110 bytes in each.
MOST_GROWTH_KIB = 8192

_DONE = re.compile(
    r"done rank (\d+) collectives (\d+) mistakes (\d+) elements (\d+) "
    r"kib (\d+) (\d+) files (\d+) (\d+)"
)


@dataclass(frozen=True)
class RankSoaked:
    """What one rank did. Memory and files: the most in the first and in the last quarter.

    mistakes: of the collectives, those that were wrong on purpose.
    """

    rank: int
    collectives: int
    mistakes: int
    elements: int
    kib: tuple[int, int]
    files: tuple[int, int]


@dataclass(frozen=True)
class Soaked:
    """How a soak ended; `ranks` lacks those that did not reach the end."""

    returncode: int
    output: str
    ranks: tuple[RankSoaked, ...]

    def faults(self, ranks: int) -> list[str]:
        """What is wrong with it, as sentences; empty is success."""
        if self.returncode != 0 or len(self.ranks) != ranks:
            return [f"{len(self.ranks)} of {ranks} ranks ended well: {self.output}"]
        found = []
        for one in self.ranks:
            if one.kib[1] - one.kib[0] > MOST_GROWTH_KIB:
                found.append(f"rank {one.rank} grew from {one.kib[0]} to {one.kib[1]} KiB")
            if one.files[1] > one.files[0]:
                found.append(f"rank {one.rank} opened files: {one.files[0]}, then {one.files[1]}")
        return found


def soak(
    program: Path,
    *,
    ranks: int,
    transport: str,
    collectives: int,
    seed: int,
    most_bytes: int = 4 << 20,
    shuffle: bool = False,
    wrong: int = 0,
    timeout_s: float,
) -> Soaked:
    """Runs `collectives` random collectives of at most `most_bytes` on each of `ranks`.

    1 in `wrong` is wrong on one rank, on purpose; 0: none.
    """
    words = [
        f"seed={seed}",
        f"collectives={collectives}",
        f"bytes={most_bytes}",
        f"shuffle={int(shuffle)}",
        f"wrong={wrong}",
    ]
    done = subprocess.run(
        mpirun_command(ranks, str(program), "soak", *words),
        env=clean_environment(DDL_TRANSPORT=transport, DDL_STALL_TIMEOUT="60"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    found = [[int(number) for number in numbers] for numbers in _DONE.findall(done.stdout)]
    soaked = [
        RankSoaked(rank, count, mistakes, elements, (kib, kib_last), (files, files_last))
        for rank, count, mistakes, elements, kib, kib_last, files, files_last in sorted(found)
    ]
    return Soaked(done.returncode, done.stdout, tuple(soaked))

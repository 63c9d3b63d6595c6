"""Collectives of more than 2^31 bytes, and of more than 2^31 elements where memory allows it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.soak.driver import clean_environment, mpirun_command

RANKS = 2
_ODD = 5  # beyond the border, so that the last piece is a short one

# Kind, dtype, elements of each rank, bytes of all ranks together.
CASES = [
    ("broadcast", "int8", 2**31 + _ODD, 2 * 2**31),
    ("allreduce", "float32", 2**29 + _ODD, 2 * 2**31),
    ("allgather", "int8", 2**30 + _ODD, 3 * 2**31),
    ("allreduce", "float16", 2**31 + _ODD, 4 * 2**31),
]


def free_bytes() -> int:
    """Memory that this machine could give now."""
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def large(program: Path, kind: str, dtype: str, count: int, transport: str) -> list[str]:
    """Runs one such collective on two ranks; returns what is wrong with it."""
    done = subprocess.run(
        mpirun_command(
            *(RANKS, str(program), "large", f"kind={kind}", f"dtype={dtype}", f"count={count}")
        ),
        env=clean_environment(DDL_TRANSPORT=transport),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    exact = all(f"exact on rank {rank}\n" in done.stdout for rank in range(RANKS))
    return [] if exact and done.returncode == 0 else [done.stdout]

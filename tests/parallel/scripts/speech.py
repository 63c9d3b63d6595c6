"""How the scripts here talk to their tests."""

from __future__ import annotations

import os
import sys

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIZE = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
# How many times longer than on an idle machine things take: tests/limits.py.
SLOWNESS = float(os.environ.get("TESTS_SLOWNESS", "1"))


def say(text: str) -> None:
    """Prints one line that Ended.lines_of finds. In one write, so that ranks do not mix."""
    sys.stdout.write(f"<{RANK}> {' '.join(text.split())}\n")
    sys.stdout.flush()

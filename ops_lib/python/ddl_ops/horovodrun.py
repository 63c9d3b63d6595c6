"""What ``horovodrun`` runs: that of an installed Horovod, else the stand-in's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    """Returns the exit code of the rank that failed first, 0 if none did."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:  # None: a mere folder of that name
        sys.path.insert(0, str(Path(__file__).with_name("stand_in")))
    from horovod.runner.launch import run_commandline

    run_commandline()
    return 0

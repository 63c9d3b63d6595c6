"""``ddl-run``: start N ranks by hand, as the train task does.

    ddl-run --np 2 python train.py --epochs 3

The ranks keep the caller's environment, folder and terminal; ``DDL_OPTIONS`` is set unless it
already is, so ``import ddl`` initialises and hooks. ``--tf1`` gives the ranks the 1.x API of
TensorFlow; ``--timeline FILE`` records what they communicate (docs/ops.md, "Seeing what the ranks
do").
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ddl_airflow.core.errors import LaunchError
from ddl_airflow.launchers.local import DEFAULT_OPTIONS, rank_argv
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces this process by mpirun. Returns only when that fails."""
    parser = argparse.ArgumentParser(
        prog="ddl-run",
        usage="ddl-run [--np N] [--tf1] [--timeline FILE] COMMAND ...",
        description="Run COMMAND as N ranks on this host, as the train task of a manifest does.",
        epilog="example: ddl-run --np 2 python train.py",
    )
    parser.add_argument("--np", type=_ranks, default=1, metavar="N", help="ranks; default 1")
    parser.add_argument(
        "--tf1", action="store_true", help="a TensorFlow 1 script: `import tensorflow` gives 1.x"
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="a Chrome trace of the ranks' communication; sets DDL_TIMELINE",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no COMMAND given; for example: ddl-run --np 2 python train.py")
    try:
        mpi = OpenMpi(find_mpirun(sys.executable))
    except LaunchError as error:
        parser.exit(2, f"ddl-run: {error}\n")
    environment = {"DDL_OPTIONS": DEFAULT_OPTIONS, **os.environ, **mpi.environment()}
    if options.tf1:
        environment["DDL_TF1"] = "1"
    if options.timeline is not None:
        environment["DDL_TIMELINE"] = os.path.abspath(options.timeline)
    line = mpi.argv(options.np, rank_argv(sys.executable, command))
    os.execve(line[0], line, environment)


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give 1 or more")
    return int(text)

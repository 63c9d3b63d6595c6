"""``ddl-run``: start N ranks by hand, as the train task does.

    ddl-run --np 2 python train.py --epochs 3
    ddl-run --tf-config master=1,ps=1,worker=2 python train.py

The ranks keep the caller's environment, folder and terminal; ``DDL_OPTIONS`` is set unless it
already is, so ``import ddl`` initialises and hooks. The second line starts a process for each task
of a cluster instead, with a TF_CONFIG of its own and without MPI, and ends when all but the
parameter servers have ended. ``--tf1`` gives the ranks the 1.x API of TensorFlow; ``--timeline
FILE`` records what they communicate (docs/ops.md, "Seeing what the ranks do").
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ddl_airflow.core.cluster import Cluster, counted
from ddl_airflow.core.errors import LaunchError
from ddl_airflow.launchers import session_directory, tasks
from ddl_airflow.launchers.local import DEFAULT_OPTIONS, rank_argv
from ddl_airflow.launchers.loopback import confined
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun


def main(argv: Sequence[str] | None = None) -> int:
    """Replaces this process by mpirun or the like. Returns only when that fails."""
    parser = argparse.ArgumentParser(
        prog="ddl-run",
        usage="ddl-run [--np N | --tf-config TASKS] [--tf1] [--timeline FILE] COMMAND ...",
        description="Run COMMAND as N ranks on this host, as the train task of a manifest does.",
        epilog="example: ddl-run --np 2 python train.py",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--np", type=_ranks, default=1, metavar="N", help="ranks; default 1")
    how.add_argument(
        "--tf-config",
        type=_tasks,
        metavar="TASKS",
        help="a process with a TF_CONFIG of its own for each task: master=1,ps=1,worker=2",
    )
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
    rank = rank_argv(sys.executable, command)
    if options.tf_config is not None:
        if options.timeline is not None:
            parser.error("--timeline records MPI's ranks; there are none with --tf-config")
        environment = dict(os.environ)
        line = tasks.argv(options.tf_config, rank)
    else:
        try:
            mpi = OpenMpi(find_mpirun(sys.executable))
        except LaunchError as error:
            parser.exit(2, f"ddl-run: {error}\n")
        environment = {"DDL_OPTIONS": DEFAULT_OPTIONS, **os.environ, **mpi.environment()}
        line = session_directory.argv(mpi.argv(options.np, rank))
    by_mpi = options.tf_config is None
    environment |= confined(sys.executable, environment, mpi=by_mpi)
    if options.tf1:
        environment["DDL_TF1"] = "1"
    if options.timeline is not None:
        environment["DDL_TIMELINE"] = os.path.abspath(options.timeline)
    os.execve(line[0], line, environment)


def _tasks(text: str) -> Cluster:
    try:
        return counted(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; for example master=1,ps=1,worker=2") from None


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give 1 or more")
    return int(text)

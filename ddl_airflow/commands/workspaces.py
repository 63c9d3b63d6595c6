"""Commands on a workspace: clean, verify-cache, tensorboard."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ddl_airflow.commands.options import Commands, takes_workspace
from ddl_airflow.commands.results import open_place
from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.layout import CACHE, cancellations, experiments
from ddl_airflow.core.output import printable
from ddl_airflow.lineage.retention import clean_results
from ddl_airflow.steps.job import cancel_all_noted
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.cleaning import Removed, Rules, clean_workspace, rules
from ddl_airflow.storage.workspace import MARK, is_workspace


def add_to(commands: Commands) -> None:
    """Adds the commands of this file."""
    tensorboard = commands.add_parser(
        "tensorboard", help="show the curves of all experiments in a workspace"
    )
    takes_workspace(tensorboard)
    tensorboard.add_argument("--host", default="localhost", help="default: localhost")
    tensorboard.add_argument("--port", type=int, default=6006, help="default: 6006")
    tensorboard.set_defaults(run=_tensorboard)

    verify = commands.add_parser(
        "verify-cache",
        help="read all staged data in a workspace's cache, and remove what was changed or damaged",
        epilog="Ends with 1 if there was any. What is removed is fetched again when it is needed.",
    )
    takes_workspace(verify)
    verify.set_defaults(run=_verify_cache)

    clean = commands.add_parser(
        "clean",
        help="remove old runs, and what nobody uses of the cache and of published trainings",
        epilog="Durations as 30d, sizes as 500Gi. Airflow is not asked which runs are open, "
        "but by clean_dag: choose --keep-runs longer than a run may wait. Jobs of schedulers that "
        "were to be cancelled are. s3:// as for lineage.",
    )
    clean.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    takes_workspace(clean)
    for name, kept in (
        ("keep-runs", "how long a run's folder stays after the last change in it"),
        ("keep-experiments", "the same for experiments with a name"),
        ("cache-size", "how much stays of the cache"),
    ):
        variable = f"AIRFLOW__DDL__{name.replace('-', '_').upper()}"
        clean.add_argument(
            f"--{name}",
            default=os.environ.get(variable, ""),
            metavar="SIZE" if name == "cache-size" else "TIME",
            help=f"{kept}; default: ${variable}, else all stays",
        )
    clean.add_argument(
        "--results",
        action="append",
        default=[],
        metavar="URI",
        help="a place of results, s3://bucket or a folder, of all DAGs that publish there; may be "
        "given again",
    )
    clean.set_defaults(run=_clean)


def _tensorboard(options: argparse.Namespace) -> int:
    """Becomes TensorBoard. Returns only when that cannot be."""
    if _says_no_workspace(options):
        return 2
    if importlib.util.find_spec("tensorboard") is None:
        said = "TensorBoard is not installed. Run pip install '.[tensorboard]' in the sources"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    folder = experiments(options.workspace).absolute()
    if not folder.is_dir():
        said = f"{folder}: no training has left an experiment there"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 1
    # Not its own script, which need not be on PATH.
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    argv += ["--host", options.host, "--port", str(options.port)]
    sys.stdout.flush()
    os.execv(sys.executable, argv)


def _verify_cache(options: argparse.Namespace) -> int:
    if _says_no_workspace(options) or _says_no_folder(options):
        return 2
    removed = 0
    for blob in Cache(options.workspace / CACHE).verify():
        print(f"removed {blob}: it is not what was fetched")
        removed += 1
    return 1 if removed else 0


def _clean(options: argparse.Namespace) -> int:
    if options.workspace is None and not options.results:
        print("ddl-airflow: clean what? Give --workspace DIR, --results URI.", file=sys.stderr)
        return 2
    asked = {
        "--keep-runs": options.keep_runs,
        "--keep-experiments": options.keep_experiments,
        "--cache-size": options.cache_size,
    }
    if options.workspace is None and any(asked.values()):
        first = next(name for name, value in asked.items() if value)
        said = f"{first} is for a workspace: give --workspace DIR"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    workspaces = [] if options.workspace is None else [options.workspace]
    if workspaces and _says_no_folder(options):
        return 2
    if workspaces and _says_other_folder(options):
        given = str(options.workspace) != os.environ.get("AIRFLOW__DDL__WORKSPACE")
        if given or not options.results:
            return 2
        workspaces = []  # of a new site, on which nothing has trained
    kept = rules(options.keep_runs, options.keep_experiments, options.cache_size)
    count, nbytes, failed = 0, 0, False
    for place in (*workspaces, *options.results):
        if isinstance(place, Path):
            _cancel_noted(place, dry_run=options.dry_run)
        try:
            for one in _removed(place, kept, dry_run=options.dry_run):
                print(printable(str(one)))
                count, nbytes = count + 1, nbytes + one.nbytes
        except DdlError as error:
            print(printable(f"ddl-airflow: {error}", keep="\t\n"), file=sys.stderr)
            failed = True
    if count or not failed:
        would = "would remove" if options.dry_run else "removed"
        print(f"{would} {count}, {nbytes / 2**20:,.1f} MiB", file=sys.stderr)
    return 1 if failed else 0


def _cancel_noted(workspace: Path, *, dry_run: bool) -> None:
    """Cancels the jobs of schedulers of which it is noted that they are to be."""

    def is_open(dag_id: str, run_id: str) -> bool:
        said = (
            f"nobody waits for the job of run {run_id} of {dag_id}. If Airflow has ended that, "
            "clean_dag cancels the job; Airflow is not asked here"
        )
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return True

    for job in cancel_all_noted(cancellations(workspace), is_open, dry_run=dry_run):
        print(printable(f"{'would cancel' if dry_run else 'cancelled'} {job}"))


def _removed(place: Path | str, kept: Rules, *, dry_run: bool) -> Iterator[Removed]:
    """Cleans a workspace, or the results at a URI."""
    if isinstance(place, Path):
        return clean_workspace(place, kept, dry_run=dry_run)
    # Nothing elsewhere is removed over a link that somebody puts into the results.
    return clean_results(open_place(place, within=()), dry_run=dry_run)


def _says_no_workspace(options: argparse.Namespace) -> bool:
    if options.workspace is None:
        print("ddl-airflow: which workspace? Give --workspace DIR.", file=sys.stderr)
    return options.workspace is None


def _says_no_folder(options: argparse.Namespace) -> bool:
    there = options.workspace.is_dir()
    if not there:
        print(f"ddl-airflow: --workspace {options.workspace} is no folder", file=sys.stderr)
    return not there


def _says_other_folder(options: argparse.Namespace) -> bool:
    """Others have folders ``runs`` and ``experiments`` too, as TensorBoard's writers do."""
    ours = is_workspace(options.workspace)
    if not ours:
        said = f"--workspace {options.workspace} is no workspace: it has neither {MARK} nor site-id"
        print(f"ddl-airflow: {said}. Give the folder of [ddl] workspace", file=sys.stderr)
    return not ours

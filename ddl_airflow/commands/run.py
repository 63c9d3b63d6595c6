"""The command that trains on this host: run."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from ddl_airflow.commands.options import Commands, takes_compute
from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.manifest import load_manifest
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.local_run import (
    FOLDER,
    STEPS,
    Asked,
    as_seen_from_here,
    log_to_terminal,
    run_manifest,
    where_it_is,
)
from ddl_airflow.steps.base import StepSkipped


def add_to(commands: Commands) -> None:
    """Adds the commands of this file."""
    run = commands.add_parser(
        "run",
        help="train a manifest on this host, all steps of its DAG, without Airflow",
        epilog=f"Works in {FOLDER} below the current folder, and publishes to {FOLDER}/results "
        "unless --publish is given. Connections are read from AIRFLOW_CONN_<ID>, secret parameters "
        "from PARAM_<NAME>. Ends with 0, 1 when a step fails, 2 for how it was called.",
    )
    run.add_argument("manifest", type=Path)
    run.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="a parameter of the manifest; or nodes, launcher, checkpoint, experiment_id; may be "
        "given again",
    )
    run.add_argument(
        "--step",
        action="append",
        default=[],
        choices=STEPS,
        metavar="STEP",
        help=f"only this step, in the run that was made last: {', '.join(STEPS)}; may be given "
        "again",
    )
    run.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="a folder with the data, in place of the manifest's",
    )
    run.add_argument(
        "--publish",
        action="store_true",
        help="publish where the manifest says, and have the model in production as its DAG would",
    )
    run.add_argument(
        "--dry-run", action="store_true", help="only check, and say what would be done"
    )
    takes_compute(run)
    run.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    manifest = load_manifest(options.manifest, compute=compute_table(options.compute))
    signal.signal(signal.SIGTERM, _interrupt)
    asked = Asked(
        Path(FOLDER),
        options.step,
        dict(options.set),
        options.data,
        options.publish,
        options.dry_run,
    )
    log_to_terminal()
    try:
        done = run_manifest(manifest, options.manifest, asked)
    except StepSkipped as skipped:
        print(f"ddl-airflow: {skipped}", file=sys.stderr)
        return 0
    except DdlError as error:
        print(f"ddl-airflow: {as_seen_from_here(str(error))}", file=sys.stderr)
        return 1
    for line in [] if options.dry_run else where_it_is(done):
        print(line)
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE; for example epochs=3")
    return name, value

"""Commands that train on this host, or say what training would be: run, plan."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddl_airflow.commands.options import (
    Commands,
    compute_by_environment,
    takes_compute,
    takes_workspace,
)
from ddl_airflow.core.errors import DdlError, ManifestInvalid
from ddl_airflow.core.layout import BY_HAND
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.rules import issues_beside
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.core.output import handling, printable
from ddl_airflow.core.plan import StoreReference, plan
from ddl_airflow.local_run import (
    STEPS,
    Asked,
    as_seen_from_here,
    log_to_terminal,
    planned,
    run_manifest,
    where_it_is,
)
from ddl_airflow.steps.base import StepSkipped


def add_to(commands: Commands) -> None:
    """Adds the commands of this file."""
    run = commands.add_parser(
        "run",
        help="train a manifest on this host, all steps of its DAG, without Airflow",
        epilog=f"Works in {BY_HAND} below the current folder, and publishes to {BY_HAND}/results "
        "unless --publish is given. Connections are read from AIRFLOW_CONN_<ID>, secret parameters "
        "from PARAM_<NAME>. Ends with 0, 1 when a step fails, 2 for how it was called.",
    )
    run.add_argument("manifest", type=Path)
    _takes_settings(run)
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
    show = commands.add_parser(
        "plan", help="print exactly what would be submitted to train a manifest; submits nothing"
    )
    show.add_argument("manifest", type=Path)
    _takes_settings(show)
    show.add_argument(
        "--json",
        action="store_true",
        help="in place of it the steps that the manifest becomes, of every run and workspace",
    )
    takes_workspace(show)
    takes_compute(show)
    show.set_defaults(run=_plan)


def _takes_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="a parameter of the manifest; or nodes, launcher, checkpoint, experiment_id; may be "
        "given again",
    )


def _loaded(options: argparse.Namespace) -> Manifest:
    """The manifest, of which all is said that ``validate`` and its DAG say of where it lies.

    Raises:
        ManifestError: it is wrong, or lies where it cannot.
    """
    path: Path = options.manifest
    manifest = load_manifest(path, compute=compute_table(options.compute))
    if issues := issues_beside(manifest, path.absolute().parent):
        raise ManifestInvalid(manifest.source, issues)
    return manifest


def _run(options: argparse.Namespace) -> int:
    manifest = _loaded(options)
    asked = Asked(
        Path(BY_HAND),
        options.step,
        dict(options.set),
        options.data,
        options.publish,
        options.dry_run,
        compute="" if options.compute == compute_by_environment() else options.compute,
    )
    log_to_terminal()
    try:
        with handling([signal.SIGTERM], _interrupt):
            done = run_manifest(manifest, options.manifest, asked)
    except StepSkipped as skipped:
        print(f"ddl-airflow: {skipped}", file=sys.stderr)
        return 0
    except DdlError as error:
        said = as_seen_from_here(f"ddl-airflow: {error}")
        print(printable(said, keep="\t\n"), file=sys.stderr)
        return 1
    for line in [] if options.dry_run else where_it_is(done):
        print(line)
    return 0


def _plan(options: argparse.Namespace) -> int:
    if options.json and options.set:
        given = ", ".join(name for name, _ in options.set)
        said = f"--set {given} is for one run, and --json prints the steps of every run"
        print(f"ddl-airflow: {said}. Leave one of them out", file=sys.stderr)
        return 2
    manifest = _loaded(options)
    if options.json:
        print(json.dumps(_plain(plan(manifest, options.manifest)), indent=2))
        return 0
    asked = Asked(options.workspace or Path(BY_HAND), settings=dict(options.set))
    for line in planned(manifest, options.manifest, asked):
        print(line)
    return 0


def _interrupt(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE; for example epochs=3")
    return name, value


def _plain(value: Any) -> Any:
    if isinstance(value, StoreReference):
        return value.view()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value

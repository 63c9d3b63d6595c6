"""Options that several commands have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeAlias

from ddl_airflow.core.manifest.sections.stores import store_kinds

# How a command finds what opens a store.
_ENVIRONMENTS = (
    f"{kind.scheme}:// by {kind.environment}" for kind in store_kinds().values() if kind.environment
)
BY_ENVIRONMENT = f"Stores are opened by the environment: {'; '.join(_ENVIRONMENTS)}."
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def compute_by_environment() -> str:
    """What the environment has for ``[ddl] compute``; empty for nothing."""
    return os.environ.get("AIRFLOW__DDL__COMPUTE", "")


def takes_compute(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--compute",
        default=compute_by_environment(),
        metavar="FILE",
        help="the site's kinds of node, as [ddl] compute; default: $AIRFLOW__DDL__COMPUTE",
    )


def _folder(text: str) -> Path:
    if not text:  # an unset variable's value; as a path it is the current folder
        raise argparse.ArgumentTypeError("is empty. Name a folder; . is the current one")
    return Path(text)


def takes_workspace(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--workspace",
        type=_folder,
        default=os.environ.get("AIRFLOW__DDL__WORKSPACE") or None,
        help="the folder of [ddl] workspace; default: $AIRFLOW__DDL__WORKSPACE",
    )

"""Options that several commands have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TypeAlias

# How a command finds what opens a store.
BY_ENVIRONMENT = (
    "s3:// uses the usual AWS_* variables, AWS_ENDPOINT_URL among them; abfs:// "
    "AZURE_STORAGE_ACCOUNT and the like; gs:// GOOGLE_APPLICATION_CREDENTIALS."
)
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def takes_compute(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--compute",
        default=os.environ.get("AIRFLOW__DDL__COMPUTE", ""),
        metavar="FILE",
        help="the site's kinds of node, as [ddl] compute; default: $AIRFLOW__DDL__COMPUTE",
    )


def takes_workspace(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--workspace",
        type=Path,
        default=os.environ.get("AIRFLOW__DDL__WORKSPACE"),
        help="the folder of [ddl] workspace; default: $AIRFLOW__DDL__WORKSPACE",
    )

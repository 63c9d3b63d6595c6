"""Every DDL_* variable is documented, known to the warning about typing errors, and read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from ddl_ops.environment import SETTINGS

from ddl_airflow.launchers.local import inherited

ROOT = Path(__file__).parents[2]
# Set for each job by the train task or its command; a value from the worker's environment would be
# of another.
_OF_ONE_JOB = {"DDL_PROGRESS", "DDL_STATS", "DDL_TIMELINE", "DDL_OPTIONS", "DDL_GPUS"}


def _read_by_python() -> set[str]:
    names = set()
    for folder in (ROOT / "ops_lib" / "python", ROOT / "ddl_airflow"):
        for path in folder.rglob("*.py"):
            if path.parent.name == "demo":  # what it sets is read through the examples' manifests
                continue
            for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    names |= {node.value} & {*re.findall(r"DDL_[A-Z0-9_]*[A-Z0-9]", node.value)}
    return names


def _read_by_library() -> set[str]:
    config = (ROOT / "ops_lib" / "cc" / "core" / "config.cc").read_text()
    return set(re.findall(r'Read\("(DDL_\w+)"\)', config))


def _documented(page: str) -> set[str]:
    first_cells = re.findall(r"^\| ([^|]*) \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    return {name for cell in first_cells for name in re.findall(r"`(DDL_\w+)`", cell)}


def test_what_is_read_is_documented_and_the_other_way_round() -> None:
    documented = _documented("ops.md") | _documented("process-contract.md")
    assert _read_by_python() | _read_by_library() == documented == SETTINGS


def test_users_settings_reach_the_ranks_of_a_train_task() -> None:
    for_users = _documented("ops.md") - _OF_ONE_JOB
    assert set(inherited(dict.fromkeys(SETTINGS, "1"))) == for_users

"""Whether a demo's home is free, for the tests of demos that were killed."""

from __future__ import annotations

from pathlib import Path

from ddl_airflow.demo.site import Taken, locked


def is_free(home: Path) -> bool:
    """Whether no demo, and nothing that one started, has the folder."""
    try:
        with locked(home, ""):
            return True
    except Taken:
        return False

"""What ``ddl-run`` runs: ``ddl_airflow.run``, which imports no Airflow.

The wheel of ddl-ops has a copy of it and of what it imports in ``launch/``, beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path


def find_launching() -> None:
    """From here on ``ddl_airflow`` can be imported, as far as ranks are started by it."""
    # Last: where ddl-airflow is installed too, a launcher that the site brings imports that.
    folder = str(Path(__file__).with_name("launch"))
    if folder not in sys.path:
        sys.path.append(folder)


def main() -> int:
    """Returns the exit code of the rank that failed first, 0 if none did."""
    find_launching()
    from ddl_airflow.run import main as run

    return run()

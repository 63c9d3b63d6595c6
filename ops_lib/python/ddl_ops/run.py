"""What ``ddl-run`` runs: ``ddl_airflow.run``, which imports no Airflow.

The wheel of ddl-ops has a copy of it and of what it imports in ``launch/``, beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Returns the exit code of the rank that failed first, 0 if none did."""
    # Last: where ddl-airflow is installed too, a launcher that the site brings imports that.
    sys.path.append(str(Path(__file__).with_name("launch")))
    from ddl_airflow.run import main as run

    return run()

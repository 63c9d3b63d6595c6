"""What is asked of the nodes of a scheduler's job before its ranks start.

``python -m ddl_ops.nodes --job … -- WORD ...`` looks at the nodes of the job that it runs in, and
becomes the words if they are well: ``ddl_airflow.launchers.job_preflight``. For that mpirun starts
``python -m ddl_ops.nodes --look QUESTION`` on each: it prints a line with ``look``, what its node
is like (``ddl_airflow.launchers.probe``), and does what ``ddl_ops.preflight`` does.

The wheel of ddl-ops has a copy of both in ``launch/``, beside this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Returns an exit code, unless it becomes another program."""
    sys.path.append(str(Path(__file__).with_name("launch")))  # last, as in ddl_ops.run
    if argv[0] == "--job":
        from ddl_airflow.launchers.job_preflight import main as look_at_all

        return look_at_all(argv[1:])
    from ddl_airflow.launchers.probe import look

    print(json.dumps({"look": look(json.loads(argv[1]))}), flush=True)
    from ddl_ops.preflight import main as reduce

    return reduce()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

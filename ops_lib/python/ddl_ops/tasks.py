"""A node's tasks of a cluster of parameter servers and workers: mpirun starts one of these on each.

``python -m ddl_ops.tasks CLUSTER COMMAND …`` runs ``ddl_airflow.launchers.tasks``, of which the
wheel of ddl-ops has a copy: no node needs ddl-airflow. With ``--here`` before CLUSTER all tasks are
this host's, and there is no mpirun.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Returns 0, or the exit code of the first task that failed here."""
    # Last, as in ddl_ops.run.
    sys.path.append(str(Path(__file__).with_name("launch")))
    from ddl_airflow.core.cluster import Cluster
    from ddl_airflow.launchers.tasks import NodeTasks, Tasks

    if argv[0] == "--here":
        return Tasks(Cluster.parse(argv[1]), argv[2:]).run()
    node = int(os.environ["OMPI_COMM_WORLD_RANK"])
    return NodeTasks(Cluster.parse(argv[0]), argv[1:], node).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

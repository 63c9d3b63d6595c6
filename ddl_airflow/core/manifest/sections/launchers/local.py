"""launcher: {kind: local}: ranks on the host that runs the task."""

from __future__ import annotations

from ddl_airflow.core.manifest.sections.launcher import Launcher


class Local(Launcher):
    """How the ranks start: on the host of the Airflow worker."""

    kind_name = "local"
    runs_on = "the host of the Airflow worker"
    implementation = "ddl_airflow.launchers.local:LocalLauncher"
    can_run_parameter_servers = True
    can_stream = True


KIND = Local

"""launcher: {kind: ssh}: planned."""

from __future__ import annotations

from ddl_airflow.core.manifest.sections.launcher import Launcher


class Ssh(Launcher):
    """Ranks on hosts that are named."""

    kind_name = "ssh"


KIND = Ssh

"""launcher: {kind: kubernetes}: planned."""

from __future__ import annotations

from ddl_airflow.core.manifest.sections.launcher import Launcher


class Kubernetes(Launcher):
    """Ranks in pods."""

    kind_name = "kubernetes"


KIND = Kubernetes

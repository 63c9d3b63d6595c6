"""The launcher without processes, for tests: no manifest names it."""

from __future__ import annotations

from ddl_airflow.core.manifest.sections.launcher import Launcher


class Fake(Launcher):
    """Jobs that end at once."""

    kind_name = "fake"
    implementation = "ddl_airflow.launchers.fake:FakeLauncher"
    in_manifests = False
    can_stream = True


KIND = Fake

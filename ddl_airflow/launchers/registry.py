"""Launchers by name, loaded when first used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.launchers.base import Launcher

_LAUNCHERS = {
    "slurm": ("ddl_airflow.launchers.slurm", "SlurmLauncher"),
    "local": ("ddl_airflow.launchers.local", "LocalLauncher"),
    "fake": ("ddl_airflow.launchers.fake", "FakeLauncher"),
}
_WITH_SETTINGS = frozenset({"slurm"})


def launcher(kind: str, settings: Mapping[str, Any] | None = None) -> Launcher:
    """A new launcher of the kind.

    Args:
        kind: its name.
        settings: what its ``render`` shall ask a scheduler for; the manifest's. Passed over by
            kinds without one: a run may choose another kind than its manifest.

    Raises:
        SubmitFailed: there is no such kind.
    """
    if kind not in _LAUNCHERS:
        known = ", ".join(sorted(_LAUNCHERS))
        raise SubmitFailed(f"launcher {kind!r} is not known. Use one of: {known}", retryable=False)
    module, name = _LAUNCHERS[kind]
    given = settings or {} if kind in _WITH_SETTINGS else {}
    made: Launcher = getattr(import_module(module), name)(**given)
    return made

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


def launcher(kind: str, settings: Mapping[str, Any] | None = None) -> Launcher:
    """A new launcher of the kind.

    Args:
        kind: its name.
        settings: what its ``render`` shall ask for, where it has a choice; the manifest's.

    Raises:
        SubmitFailed: there is no such kind.
    """
    if kind not in _LAUNCHERS:
        known = ", ".join(sorted(_LAUNCHERS))
        raise SubmitFailed(f"launcher {kind!r} is not known. Use one of: {known}", retryable=False)
    module, name = _LAUNCHERS[kind]
    made: Launcher = getattr(import_module(module), name)(**(settings or {}))
    return made

"""Launchers by name, loaded when first used."""

from __future__ import annotations

from importlib import import_module

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.launchers.base import Launcher

_LAUNCHERS = {
    "local": ("ddl_airflow.launchers.local", "LocalLauncher"),
    "fake": ("ddl_airflow.launchers.fake", "FakeLauncher"),
}


def launcher(kind: str) -> Launcher:
    """A new launcher of the kind.

    Raises:
        SubmitFailed: there is no such kind.
    """
    if kind not in _LAUNCHERS:
        known = ", ".join(sorted(_LAUNCHERS))
        raise SubmitFailed(f"launcher {kind!r} is not known. Use one of: {known}", retryable=False)
    module, name = _LAUNCHERS[kind]
    made: Launcher = getattr(import_module(module), name)()
    return made

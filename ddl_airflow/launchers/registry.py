"""Launchers by kind, loaded when first used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from ddl_airflow.core.connections import FindConnection, own_connection
from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.manifest.sections.launchers import launcher_kind, own_kinds, site_kinds
from ddl_airflow.launchers.base import Connecting, Launcher


def launcher(
    kind: str,
    settings: Mapping[str, Any] | None = None,
    connections: FindConnection = own_connection,
) -> Launcher:
    """A new launcher of the kind.

    Args:
        kind: its name.
        settings: arguments of its class; the manifest's. Passed over by kinds without any.
        connections: finds the Airflow connection that it may be told; by default in the
            environment.

    Raises:
        SubmitFailed: there is no such kind, or its package cannot be loaded.
    """
    found = launcher_kind(kind)
    if found is None or not found.implementation:
        own = [name for name, one in own_kinds().items() if one.implementation]
        known = ", ".join(sorted((*own, *site_kinds())))
        raise SubmitFailed(f"launcher {kind!r} is not known. Use one of: {known}", retryable=False)
    module, _, name = found.implementation.partition(":")
    given = settings or {} if found.own_fields() else {}
    try:
        of_kind = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SubmitFailed(
            f"launcher {kind!r}: {found.implementation} cannot be loaded: {error}. Install the "
            "package that brings it wherever Airflow runs, the triggerer among them",
            retryable=False,
        ) from error
    made: Launcher = of_kind(**given)
    if isinstance(made, Connecting):
        made.find_connections(connections)
    return made

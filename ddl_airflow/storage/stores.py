"""Opens the store that a URI names, of whatever kind."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest.sections.stores import kind_of_uri, store_kinds
from ddl_airflow.storage.store import Access, ObjectStore, StoreClass


def open_store(
    uri: str,
    client: Any = None,
    access_key_id: str = "",
    within: Sequence[Path] | None = None,
    said: str = "",
) -> ObjectStore:
    """The store that a URI, as ``ObjectStore.uri`` gives it, names.

    Args:
        uri: of a kind in ``core.manifest.sections.stores``.
        client, access_key_id, within, said: as ``Access`` has them.

    Raises:
        ConnectionInvalid: it names no store, or one that needs a client.
    """
    return _class_of(uri).opened(uri, Access(client, access_key_id, within, said))


def open_by_environment(uri: str, within: Sequence[Path] | None = None) -> ObjectStore:
    """The store that a URI names, with endpoint and keys as the kind's own tools find them.

    Raises:
        ConnectionInvalid: it names no store, or one that cannot be opened so.
    """
    kind = _class_of(uri)
    return kind.opened(uri, Access(kind.client_of_environment(), within=within))


def _class_of(uri: str) -> StoreClass:
    kind = kind_of_uri(uri)
    if kind is None:
        forms = " or ".join(one.form for one in store_kinds().values())
        raise ConnectionInvalid(f"{uri!r} names no store. Write {forms}")
    module, _, name = kind.implementation.partition(":")
    return cast(StoreClass, getattr(import_module(module), name))

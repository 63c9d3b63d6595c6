"""Opens the store that a URI names, of whatever kind."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest.sections.store import StoreKind
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
    return kind_and_class(uri)[1].opened(uri, Access(client, access_key_id, within, said))


def open_by_environment(uri: str, within: Sequence[Path] | None = None) -> ObjectStore:
    """The store that a URI names, with endpoint and keys as the kind's own tools find them.

    Raises:
        ConnectionInvalid: it names no store, or one that cannot be opened so.
    """
    _kind, implementation = kind_and_class(uri)
    return implementation.opened(uri, Access(implementation.client_of_environment(), within=within))


def kind_and_class(uri: str) -> tuple[StoreKind, StoreClass]:
    """The kind that a URI has, and the class of its stores. Raises ConnectionInvalid for none."""
    kind = kind_of_uri(uri)
    if kind is None:
        forms = " or ".join(one.form for one in store_kinds().values())
        raise ConnectionInvalid(f"{uri!r} names no store. Write {forms}")
    module, _, name = kind.implementation.partition(":")
    return kind, cast(StoreClass, getattr(import_module(module), name))


def place_of(store: ObjectStore) -> tuple[str, ...]:
    """Store, bucket and folders, whatever opens it, so that a place inside another starts with it.

    A service that has several addresses is as many.
    """
    scheme, _, path = store.resolved_uri.partition("://")
    if not store.endpoint:
        return (scheme, *filter(None, unquote(path).split("/")))
    url = urlsplit(store.endpoint)
    host, port = url.hostname or "", url.port or {"http": 80, "https": 443}.get(url.scheme)
    # Its buckets have their names for themselves, in whatever region they are asked for.
    host = "amazonaws.com" if host.endswith(".amazonaws.com") else f"{host}:{port}"
    return (scheme, host + url.path.rstrip("/"), *filter(None, path.split("/")))

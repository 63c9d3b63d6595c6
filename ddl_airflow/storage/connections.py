"""The object stores that connections open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.storage.store import ObjectStore
from ddl_airflow.storage.stores import kind_and_class, open_store


def open_by_connection(uri: str, connection: AirflowConnection) -> ObjectStore:
    """The store that a URI names, as a connection's own fields open it. Contacts nobody.

    Raises:
        ConnectionInvalid: the connection is not of its kind, or its fields are not right.
    """
    implementation = kind_and_class(uri)[1]
    check_type(uri, connection.conn_id, connection.conn_type)
    return implementation.opened(uri, implementation.access_by(connection))


def check_type(uri: str, conn_id: str, conn_type: str) -> None:
    """Raises ConnectionInvalid if a connection is of something else than what a URI names."""
    types = kind_and_class(uri)[0].connection_types
    if types and conn_type not in types:
        raise ConnectionInvalid(
            f"connection {conn_id!r} is of type {conn_type!r}, and {uri} is opened by one of type "
            f"{' or '.join(types)}"
        )


def open_by_keys(
    reference: StoreReference,
    connection: Connection,
    environ: Mapping[str, str],
    may_read: Sequence[str],
    mask: Callable[[str], object] = lambda secret: None,
) -> ObjectStore:
    """The store that a reference names, with keys that are the manifest's own, or variables.

    Args:
        reference: with the URI.
        connection: of the reference; without a ``conn_id``.
        environ, may_read: as ``Connection.resolve`` has them.
        mask: called with each key, before anything can say it.

    Raises:
        ConnectionInvalid: as ``Connection.resolve``; or the endpoint is none.
    """
    from ddl_airflow.storage.s3_client import s3_client

    keys = connection.resolve(environ, may_read)
    mask(keys.access_key_id)
    mask(keys.secret_access_key)
    # A reference is shown as it stands in the manifest; its value is the site's.
    said = connection.endpoint_url if connection.endpoint_url != keys.endpoint_url else None
    said = said or ""
    client = s3_client(
        keys.endpoint_url,
        keys.access_key_id,
        keys.secret_access_key,
        keys.region_name,
        said=said,
    )
    return open_store(reference.uri, client, keys.access_key_id, said=said)

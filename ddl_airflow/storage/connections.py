"""The object stores that connections open."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.storage.store import ObjectStore
from ddl_airflow.storage.stores import open_store

OWN_TYPE = "ddlstore"


def store_client(connection: AirflowConnection) -> Any:
    """A boto3 S3 client by a connection of type ``ddlstore``, or ``aws`` with keys.

    Contacts nobody. The extra may have region_name, ca_bundle or verify, what ``s3_settings`` reads
    and, of type ``aws``, endpoint_url.

    Raises:
        ConnectionInvalid: a key is missing, the endpoint is none, a role is to be taken, or the
            extra says what it may not.
    """
    from ddl_airflow.storage.s3_client import s3_client, s3_settings  # no parse needs them

    name, extra = connection.conn_id, connection.extra
    if role := extra.get("role_arn"):
        raise ConnectionInvalid(
            f"connection {name!r} takes the role {role}, which only Airflow does, by its amazon "
            "provider. Give one with the role's own keys; or run it in Airflow."
        )
    if not (connection.login and connection.password):
        missing = "secret access key" if connection.login else "access key ID"
        raise ConnectionInvalid(f"connection {name!r} has no {missing}. Enter it.")
    endpoint = connection.host or extra.get("endpoint_url") or None
    if connection.host and connection.port:
        endpoint = f"{connection.host}:{connection.port}"
    return s3_client(
        endpoint,
        connection.login,
        connection.password,
        extra.get("region_name") or None,
        extra.get("ca_bundle") or (None if extra.get("verify") == "" else extra.get("verify")),
        settings=s3_settings(extra),
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

"""Store references to open stores, and the connection type. The only reader of connections."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from airflow.configuration import conf
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException, AirflowSecretsBackendAccessDenied
from airflow.sdk.log import mask_secret

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import ConnectionInvalid, StagingError
from ddl_airflow.core.manifest.sections.places import MANIFEST_VARIABLES
from ddl_airflow.core.manifest.sections.stores import kind_of_uri
from ddl_airflow.core.manifest.sections.stores.s3 import KIND as S3
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.storage.connections import check_type, open_by_connection, open_by_keys
from ddl_airflow.storage.store import ObjectStore
from ddl_airflow.storage.stores import open_store


class ObjectStoreHook(BaseHook):
    """The store that a connection of type ``ddlstore`` describes.

    Host is the endpoint, login and password are the keys; the extra may have what
    ``client_by_connection`` reads, and bucket. The form is in ``ddl_airflow.provider_info``.
    """

    conn_name_attr = "conn_id"
    default_conn_name = "ddlstore_default"
    conn_type = "ddlstore"
    hook_name = "DDL object store"

    def __init__(self, conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.conn_id = conn_id

    def get_conn(self) -> Any:
        """A boto3 S3 client; contacts nobody but Airflow.

        Raises:
            ConnectionInvalid: a key is missing, or the endpoint is none.
        """
        from ddl_airflow.storage.s3_client import client_by_connection  # no parse needs it

        connection = self.get_connection(self.conn_id)
        if connection.login:
            mask_secret(connection.login)
        return client_by_connection(masked(self.conn_id, connection))

    def test_connection(self) -> tuple[bool, str]:
        """Whether the store answers and takes the keys, and what it says."""
        from ddl_airflow.storage.s3_client import s3_answer

        try:
            client = self.get_conn()
            extra = self.get_connection(self.conn_id).extra_dejson
            said = s3_answer(client, extra.get("bucket") or "")
        except StagingError as error:
            return False, f"{type(error).__name__}: {error}"
        return True, f"{client.meta.endpoint_url} takes the keys: {said}"


def store_of(reference: StoreReference) -> ObjectStore:
    """The store that a reference names. Contacts nobody but Airflow.

    Raises:
        ConnectionInvalid: the Airflow connection, an environment variable or the endpoint is
            missing, malformed, or not for manifests (``[ddl] manifest_variables``).
    """
    connection = reference.connection
    if connection is None:
        return open_store(reference.uri, within=reference.within)
    # Amazon's provider finds keys that no field of a connection holds: roles, profiles.
    if connection.conn_id and kind_of_uri(reference.uri) is S3:
        return open_store(reference.uri, *_client_of_connection(reference.uri, connection.conn_id))
    if connection.conn_id:
        return open_by_connection(reference.uri, connection_of(connection.conn_id))
    may_read = conf.get("ddl", "manifest_variables", fallback=",".join(MANIFEST_VARIABLES))
    names = [one for one in re.split(r"[\s,]+", may_read) if one]
    return open_by_keys(reference, connection, os.environ, names, mask_secret)


def connection_of(conn_id: str) -> AirflowConnection:
    """An Airflow connection, whose secrets Airflow's logs mask from then on.

    Raises:
        ConnectionInvalid: there is none of that name, or Airflow does not tell it.
    """
    with _told(conn_id, f"Airflow has no connection {conn_id!r}"):
        return masked(conn_id, BaseHook.get_connection(conn_id))


async def connection_soon(conn_id: str) -> AirflowConnection:
    """As ``connection_of``, in a triggerer."""
    with _told(conn_id, f"Airflow has no connection {conn_id!r}"):
        return masked(conn_id, await BaseHook.aget_connection(conn_id))


@contextmanager
def _told(conn_id: str, absent: str, of_type: str = "") -> Iterator[None]:
    """Says what it means where Airflow does not tell a connection.

    Args:
        conn_id: its id.
        absent: that there is none, as whoever needs it says so.
        of_type: what to choose where it is added.
    """
    try:
        yield
    except AirflowNotFoundException as error:
        # It says the same where a secrets backend, or its own API, fails for a moment.
        raise ConnectionInvalid(
            f"{absent}. Add it under Admin > Connections{of_type}; or set "
            f"AIRFLOW_CONN_{conn_id.upper()}. If it is there, Airflow's API or secrets backend did "
            "not answer for it.",
            retryable=True,
        ) from error
    except AirflowSecretsBackendAccessDenied as error:  # to Python a file that may not be read
        raise ConnectionInvalid(
            f"Airflow denies the connection {conn_id!r} to this task or triggerer. See which team "
            "it is of; or name one that it may read."
        ) from error


def masked(conn_id: str, connection: Any) -> AirflowConnection:
    """Airflow's object of a connection as ours. Its secrets are masked from then on."""
    found = _plain(conn_id, connection)
    for secret in found.secrets():
        mask_secret(secret)
    return found


def _plain(conn_id: str, connection: Any) -> AirflowConnection:
    return AirflowConnection(
        conn_id,
        connection.conn_type or "",
        connection.host or "",
        connection.port,
        connection.login or "",
        connection.password or "",
        connection.extra_dejson,
    )


def secret_of(conn_id: str) -> str:
    """The password of an Airflow connection, which Airflow's logs mask from then on.

    Raises:
        ConnectionInvalid: there is no such connection, or no password in it.
    """
    absent = f"a secret has its value from Airflow's connection {conn_id!r}, which there is not"
    with _told(conn_id, absent):
        password: str | None = BaseHook.get_connection(conn_id).password
    if not password:
        raise ConnectionInvalid(
            f"a secret has its value from Airflow's connection {conn_id!r}, which has no "
            "password. Enter it there."
        )
    mask_secret(password)
    return password


def _client_of_connection(uri: str, conn_id: str) -> tuple[Any, str]:
    """A client for the URI, and its access key where that says who asks: a role's changes."""
    from airflow.providers.amazon.aws.hooks.s3 import S3Hook

    from ddl_airflow.storage.s3_client import s3_config, s3_settings, with_settings

    absent = f"conn_id: Airflow has no connection {conn_id!r}"
    # The amazon provider would go on with whatever keys the machine itself has.
    with _told(conn_id, absent, f", type {ObjectStoreHook.hook_name}"):
        connection = BaseHook.get_connection(conn_id)
    # Of another type it would do so too, with a warning.
    check_type(uri, conn_id, connection.conn_type or "")
    if connection.conn_type == ObjectStoreHook.conn_type:
        return ObjectStoreHook(conn_id).get_conn(), str(connection.login)
    settings = s3_settings(connection.extra_dejson)
    s3_config(None, settings)  # says what is wrong with ``config_kwargs``, where the hook does not
    endpoint = S3Hook(aws_conn_id=conn_id).conn_config.get_service_endpoint_url("s3")
    config = s3_config(endpoint, settings)  # the hook takes either, and not both
    client = S3Hook(aws_conn_id=conn_id, config=config).get_conn()
    return with_settings(client, settings), ""

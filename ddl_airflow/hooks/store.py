"""Store references to open stores. The only reader of Airflow connections."""

from __future__ import annotations

import os
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException
from airflow.sdk.log import mask_secret

from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.storage.s3 import s3_client, s3_config
from ddl_airflow.storage.store import ObjectStore, open_store


def store_of(reference: StoreReference) -> ObjectStore:
    """The store that a reference names. Contacts nobody but Airflow.

    Raises:
        ConnectionInvalid: the Airflow connection, an environment variable or the endpoint is
            missing or malformed.
    """
    connection = reference.connection
    if connection is None:
        return open_store(reference.uri)
    if connection.conn_id:
        return open_store(reference.uri, _client_of_connection(connection.conn_id))
    keys = connection.resolve(os.environ)
    mask_secret(keys.access_key_id)
    mask_secret(keys.secret_access_key)
    client = s3_client(
        keys.endpoint_url, keys.access_key_id, keys.secret_access_key, keys.region_name
    )
    return open_store(reference.uri, client)


def _client_of_connection(conn_id: str) -> Any:
    from airflow.providers.amazon.aws.hooks.s3 import S3Hook

    try:
        BaseHook.get_connection(conn_id)
    except AirflowNotFoundException as error:
        # The amazon provider would go on with whatever keys the machine itself has.
        raise ConnectionInvalid(
            f"conn_id: Airflow has no connection {conn_id!r}. Add it under Admin > Connections, "
            f"type aws, with endpoint_url in its extra; or set AIRFLOW_CONN_{conn_id.upper()}."
        ) from error
    endpoint = S3Hook(aws_conn_id=conn_id).conn_config.get_service_endpoint_url("s3")
    return S3Hook(aws_conn_id=conn_id, config=s3_config(endpoint)).get_conn()

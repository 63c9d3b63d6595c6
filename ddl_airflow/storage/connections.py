"""Connections to object stores, as Airflow writes them, and the stores that they open.

Airflow's own are read in ``ddl_airflow.hooks.store``; without Airflow, those in the environment.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.core.manifest import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.storage.store import ObjectStore
from ddl_airflow.storage.stores import open_store

OWN_TYPE = "ddlstore"


@dataclass(frozen=True)
class StoreConnection:
    """The fields of a connection of type ``ddlstore``, or of type ``aws`` with keys.

    Attributes:
        host: the endpoint, with its scheme; empty for Amazon's own.
        extra: may have region_name, ca_bundle and, of type ``aws``, endpoint_url.
    """

    conn_id: str
    conn_type: str = OWN_TYPE
    host: str = ""
    port: int | None = None
    login: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def client(self) -> Any:
        """A boto3 S3 client; contacts nobody.

        Raises:
            ConnectionInvalid: a key is missing, or the endpoint is none.
        """
        from ddl_airflow.storage.s3_client import s3_client  # no parse needs it

        if not (self.login and self.password):
            missing = "secret access key" if self.login else "access key ID"
            raise ConnectionInvalid(f"connection {self.conn_id!r} has no {missing}. Enter it.")
        endpoint = self.host or self.extra.get("endpoint_url") or None
        if self.host and self.port:
            endpoint = f"{self.host}:{self.port}"
        return s3_client(
            endpoint,
            self.login,
            self.password,
            self.extra.get("region_name") or None,
            self.extra.get("ca_bundle") or None,
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


def connection_of_environment(conn_id: str, environ: Mapping[str, str]) -> StoreConnection | None:
    """The connection in ``AIRFLOW_CONN_<ID>``, as JSON or as a URI; None if it is not set.

    Raises:
        ConnectionInvalid: it is neither.
    """
    variable = f"AIRFLOW_CONN_{conn_id.upper()}"
    text = environ.get(variable, "").strip()
    if not text:
        return None
    try:
        return _of_json(conn_id, text) if text.startswith("{") else _of_uri(conn_id, text)
    except (ValueError, TypeError, AttributeError):
        # Not what was wrong with it: it holds a key.
        raise ConnectionInvalid(
            f"{variable} is no connection. Write it as Airflow does: "
            '{"conn_type": "ddlstore", "host": "https://…", "login": "…", "password": "…"}'
        ) from None


def _of_json(conn_id: str, text: str) -> StoreConnection:
    said = json.loads(text)
    extra = said.get("extra") or {}
    port = said.get("port")
    return StoreConnection(
        conn_id,
        str(said.get("conn_type") or OWN_TYPE),
        str(said.get("host") or ""),
        None if port in (None, "") else int(port),
        str(said.get("login") or ""),
        str(said.get("password") or ""),
        dict(json.loads(extra) if isinstance(extra, str) else extra),
    )


def _of_uri(conn_id: str, text: str) -> StoreConnection:
    parts = urlsplit(text)
    if not parts.scheme:
        raise ValueError("no URI")
    extra: dict[str, Any] = dict(parse_qsl(parts.query))
    if "__extra__" in extra:
        extra = dict(json.loads(extra["__extra__"]))
    return StoreConnection(
        conn_id,
        parts.scheme.replace("-", "_"),
        unquote(parts.hostname or ""),
        parts.port,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
        extra,
    )

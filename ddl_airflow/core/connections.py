"""Connections as Airflow writes them. Its own are read in ``ddl_airflow.hooks``; without Airflow,
those in the environment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

from ddl_airflow.core.errors import ConnectionInvalid

_DEFAULT_TYPE = "ddlstore"
# Of the types ssh, kubernetes, wasb and aws.
_SECRET_EXTRAS = (
    "private_key",
    "private_key_passphrase",
    "connection_string",
    "sas_token",
    "aws_session_token",
)


@dataclass(frozen=True)
class AirflowConnection:
    """The fields of a connection.

    Attributes:
        conn_id: its name.
        conn_type: what it is to, such as ``ssh``.
        host: of type ``ddlstore`` the endpoint, with its scheme.
        extra: what its type knows besides.
    """

    conn_id: str
    conn_type: str = _DEFAULT_TYPE
    host: str = ""
    port: int | None = None
    login: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def is_set(self, name: str) -> bool:
        """Whether an extra says yes, as forms and people write it."""
        return str(self.extra.get(name, "")).strip().lower() in ("true", "yes", "1", "on")

    def text(self, name: str) -> str:
        """An extra as text; empty where it is not given."""
        value = self.extra.get(name)
        return "" if value is None else str(value).strip()

    def secrets(self) -> list[str]:
        """What nobody else may read: not in a log, and not where a log quotes it as JSON."""
        found = [self.password, *map(self.text, _SECRET_EXTRAS)]
        session = self.extra.get("session_kwargs")  # of earlier versions of the amazon provider
        if isinstance(session, Mapping):
            found.append(str(session.get("aws_session_token") or "").strip())
        if given := self.extra.get("keyfile_dict"):  # of the type google_cloud_platform
            with suppress(ValueError, TypeError, AttributeError):
                key = str((json.loads(given) if isinstance(given, str) else given)["private_key"])
                found += [key, json.dumps(key)[1:-1]]
        return [one for one in found if one]


# The connection of an id; raises ConnectionInvalid if there is none.
FindConnection: TypeAlias = Callable[[str], AirflowConnection]


def own_connection(conn_id: str) -> AirflowConnection:
    """The connection in this process's environment.

    Raises:
        ConnectionInvalid: it is not there, or none.
    """
    if (known := connection_of_environment(conn_id, os.environ)) is None:
        raise ConnectionInvalid(
            f"connection {conn_id!r} is one of Airflow, which is not asked here. Set "
            f"AIRFLOW_CONN_{conn_id.upper()} to it, as Airflow reads it too."
        )
    return known


def connection_of_environment(conn_id: str, environ: Mapping[str, str]) -> AirflowConnection | None:
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


def _of_json(conn_id: str, text: str) -> AirflowConnection:
    said = json.loads(text)
    extra = said.get("extra") or {}
    port = said.get("port")
    return AirflowConnection(
        conn_id,
        str(said.get("conn_type") or _DEFAULT_TYPE),
        str(said.get("host") or ""),
        None if port in (None, "") else int(port),
        str(said.get("login") or ""),
        str(said.get("password") or ""),
        dict(json.loads(extra) if isinstance(extra, str) else extra),
    )


def _of_uri(conn_id: str, text: str) -> AirflowConnection:
    parts = urlsplit(text)
    conn_type, protocol = parts.scheme, ""
    if not conn_type:
        raise ValueError("no URI")
    rest = text.partition("://")[2]
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", rest):
        # The host has a scheme, which Airflow writes in front of the login.
        parts = urlsplit(rest)
        protocol = f"{parts.scheme}://"
    host = unquote(parts.hostname or "")
    extra: dict[str, Any] = dict(parse_qsl(parts.query, keep_blank_values=True))
    if "__extra__" in extra:
        extra = dict(json.loads(extra["__extra__"]))
    return AirflowConnection(
        conn_id,
        conn_type.replace("-", "_"),
        host and protocol + host,
        parts.port,
        unquote(parts.username or ""),
        unquote(parts.password or ""),
        extra,
    )

"""Opens the store that a URI names, of whatever kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.store import ObjectStore


def open_store(
    uri: str,
    client: Any = None,
    access_key_id: str = "",
    within: Sequence[Path] | None = None,
    said: str = "",
) -> ObjectStore:
    """The store that a uri, as ``ObjectStore.uri`` gives it, names.

    Args:
        uri: ``s3://bucket[/prefix]`` or ``file:///folder``.
        client: a boto3 S3 client, for ``s3://`` alone.
        access_key_id: whose keys the client has, where that is known.
        said: what stands for the client's endpoint in messages, if it is not to be shown.
        within: folders out of which no link may lead, for ``file://``; empty: the folder itself;
            None: links are followed.
    """
    scheme, _, rest = uri.partition("://")
    if scheme == "file" and rest.startswith("/"):
        return FolderStore(Path(unquote(rest)), within=within)
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise ConnectionInvalid(f"{uri!r} names no store. Write s3://bucket/prefix or file:///path")
    if client is None:
        raise ConnectionInvalid(f"{uri} needs a connection. Give its endpoint and keys.")
    return S3Store(client, bucket, prefix, access_key_id, said)

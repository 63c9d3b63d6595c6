"""Objects of Azure Blob Storage, by Microsoft's own library: the extra ``azure``."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    ObjectArchived,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.storage.cloud import (
    TIMEOUT,
    CloudStore,
    Seen,
    Sink,
    Small,
    Take,
    is_md5,
    library_of,
    meaning_of_status,
)
from ddl_airflow.storage.content_types import content_type
from ddl_airflow.storage.lanes import Lanes
from ddl_airflow.storage.store import (
    CHUNK,
    PIECE,
    Access,
    Advance,
    StoredObject,
    once_for_an_environment,
)

_RIGHTS = "Storage Blob Data Reader, and for results Contributor"
_AT_A_TIME = 4 * CHUNK  # of what is read: all of it is in memory twice
_PAGE = 5_000  # blobs of a listing at a time; the service gives no more
_PARTS_AT_ONCE = 4  # of one file
_MOST_BLOCKS = 50_000  # of one blob; Source: Azure, Scalability targets for Blob Storage
# Of the library's own, whose first wait else is 15 s.
_TRIES: dict[str, Any] = {
    "retry_total": 3,
    "initial_backoff": 1,
    "increment_base": 2,
    "random_jitter_range": 1,
}
_ARCHIVE = "Archive"
_ARCHIVED = ("BlobArchived", "BlobBeingRehydrated")
# Answers to a condition that does not hold.
_OTHERWISE = ("BlobAlreadyExists", "ConditionNotMet", "BlobNotFound")


class AzureStore(CloudStore):
    """Blobs of one container under one prefix.

    A blob has an MD5 if whoever stored it has given one, as this does; else its ETag here is
    Azure's, which each write changes, and which all that is read must have.
    """

    scheme = "abfs"

    @classmethod
    def client_of_environment(cls) -> Any:
        """As Azure's command line finds it; one client for all who ask."""
        return _client_of_environment()

    @classmethod
    def access_by(cls, connection: AirflowConnection) -> Access:
        """By a connection of type ``wasb``: connection_string, sas_token or tenant_id of its extra;
        or the account and its key as login and password; else as the machine's identity.
        """
        with library_of("azure"):
            return _access(connection)

    @property
    def endpoint(self) -> str:
        """The account's address."""
        parts = f"{self._client.primary_endpoint}".partition("?")  # without a signature
        return parts[0].rstrip("/")

    def _blob(self, name: str) -> Any:
        return self._client.get_blob_client(self.bucket, name)

    @contextmanager
    def _errors(self, key: str = "", needed: int = 0) -> Iterator[None]:
        from azure.core.exceptions import AzureError

        try:
            yield
        except AzureError as error:
            raise _meaning(error, self._where(key), needed) from error

    def _listed(self, start: str) -> Iterator[StoredObject]:
        container = self._client.get_container_client(self.bucket)
        for blob in container.list_blobs(
            name_starts_with=start, include=["metadata"], results_per_page=_PAGE
        ):
            # A folder, where the account has a hierarchical namespace.
            if (blob.metadata or {}).get("hdi_isfolder") != "true":
                modified = blob.last_modified.timestamp()
                archived = _ARCHIVE if blob.blob_tier == _ARCHIVE else ""
                yield StoredObject(blob.name, blob.size, _etag(blob), modified, archived)

    def _named(self, start: str) -> Iterable[str]:
        container = self._client.get_container_client(self.bucket)
        found = container.walk_blobs(name_starts_with=start, results_per_page=_PAGE)
        return [one.name for one in found]

    def _fetch(self, name: str, etag: str, start: int, count: int, take: Take) -> None:
        condition = {} if is_md5(etag) else _if(etag)
        with self._content_ranges(name):
            read = self._blob(name).download_blob(
                offset=start, length=count, retry_total=0, **condition
            )
            read.readinto(Sink(take))

    @contextmanager
    def _content_ranges(self, name: str) -> Iterator[None]:
        """Makes an error of an answer without one, which is the library's bare ValueError."""
        try:
            yield
        except ValueError as error:
            raise StagingError(
                f"abfs://{self.bucket}/{name} at {self.endpoint}: {str(error).rstrip('.')}. Let "
                "what is between here and the service pass ranges on, and answer nothing itself"
            ) from error

    def _store(self, name: str, body: bytes | memoryview, md5: bytes) -> str:
        self._blob(name).upload_blob(bytes(body), overwrite=True, **_as(name, md5))
        return md5.hex()  # else it were refused

    def _store_large(self, name: str, file: BinaryIO, size: int, seen: Seen) -> str:
        """In blocks, each named by its number and MD5: what is there already is not sent."""
        from azure.storage.blob import BlobBlock

        blob, part_size = self._blob(name), PIECE
        while size > part_size * _MOST_BLOCKS:
            part_size *= 2
        there, names = self._blocks(blob), [""] * -(-size // part_size)

        def bring(number: int, part: memoryview, proceed: Advance) -> None:
            at = 0
            while at < len(part):
                if not (n := os.preadv(file.fileno(), [part[at:]], number * part_size + at)):
                    seen.changed()
                at += n
            md5 = hashlib.md5(part, usedforsecurity=False).hexdigest()
            names[number] = f"{number:06}-{md5}"
            if names[number] not in there:
                blob.stage_block(names[number], bytes(part), validate_content=True)
            proceed(0)

        Lanes(size, part_size, bring, seen, seen.wait, _PARTS_AT_ONCE).run()
        blob.commit_block_list([BlobBlock(one) for one in names], **_as(name, seen.md5))
        return seen.md5.hex()

    def _blocks(self, blob: Any) -> set[str]:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            _, uncommitted = blob.get_block_list("uncommitted")
        except ResourceNotFoundError:
            return set()
        return {block.id for block in uncommitted}

    def _copy(self, source: str, etag: str, name: str) -> str:
        found, blob = self._blob(source), self._blob(name)
        properties = found.get_blob_properties()
        if _etag(properties) != etag:
            return ""
        begun = blob.start_copy_from_url(
            found.url, source_etag=properties.etag, source_match_condition=_if_not_modified()
        )
        if begun["copy_status"] != "success":
            # It would take a while. What it has begun is an empty blob.
            blob.abort_copy(begun["copy_id"])
            blob.delete_blob()
            return ""
        return _etag(blob.get_blob_properties())

    def _small(self, name: str) -> Small:
        with self._content_ranges(name):
            read = self._blob(name).download_blob()
        return Small(read.readall(), _etag(read.properties), str(read.properties.etag))

    def _store_if(self, name: str, body: bytes, version: str | None) -> bool:
        from azure.core.exceptions import HttpResponseError

        condition = {"overwrite": False} if version is None else {"overwrite": True, **_if(version)}
        md5 = hashlib.md5(body, usedforsecurity=False).digest()
        try:
            # Tried again by put_if, which knows then that the one that is there may be its own.
            self._blob(name).upload_blob(body, retry_total=0, **condition, **_as(name, md5))
        except HttpResponseError as error:
            if getattr(error, "error_code", "") in _OTHERWISE:
                return False
            raise
        return True

    def _delete(self, name: str) -> None:
        self._blob(name).delete_blob(delete_snapshots="include")


def _etag(properties: Any) -> str:
    md5 = properties.content_settings.content_md5
    return bytes(md5).hex() if md5 else str(properties.etag).strip('"')


def _as(name: str, md5: bytes) -> dict[str, Any]:
    """What a blob is stored with."""
    from azure.storage.blob import ContentSettings

    settings = ContentSettings(content_type(name), content_md5=bytearray(md5))
    return {"content_settings": settings, "validate_content": True}


def _if(etag: str) -> dict[str, Any]:
    """That there is this version of a blob, and no other."""
    quoted = etag if etag.startswith('"') else f'"{etag}"'
    return {"etag": quoted, "match_condition": _if_not_modified()}


def _if_not_modified() -> Any:
    from azure.core import MatchConditions

    return MatchConditions.IfNotModified


def _access(connection: AirflowConnection) -> Access:
    name = f"connection {connection.conn_id!r}"
    if text := connection.text("connection_string"):
        return _by_connection_string(text, f"{name}: connection_string")
    url = _account_url(connection.host or connection.login)
    if not url:
        raise ConnectionInvalid(f"{name} names no account. Enter it as login, or its URL as host.")
    if sas := connection.text("sas_token"):
        return _by_signature(url, sas)
    if tenant := connection.text("tenant_id"):
        from azure.identity import ClientSecretCredential

        secret = ClientSecretCredential(tenant, connection.login, connection.password)
        return Access(_client(url, secret), connection.login)
    if connection.password:
        return _by_key(url, connection.login, connection.password)
    return _by_identity(
        url,
        managed_identity_client_id=connection.text("managed_identity_client_id") or None,
        workload_identity_tenant_id=connection.text("workload_identity_tenant_id") or None,
    )


@once_for_an_environment
def _client_of_environment(environ: Mapping[str, str]) -> Any:
    with library_of("azure"):
        if text := environ.get("AZURE_STORAGE_CONNECTION_STRING"):
            return _by_connection_string(text, "AZURE_STORAGE_CONNECTION_STRING").client
        account = environ.get("AZURE_STORAGE_ACCOUNT", "")
        if not (url := _account_url(account)):
            raise ConnectionInvalid(
                "abfs:// needs an account. Set AZURE_STORAGE_ACCOUNT, and AZURE_STORAGE_KEY or "
                "AZURE_STORAGE_SAS_TOKEN; or AZURE_STORAGE_CONNECTION_STRING."
            )
        if key := environ.get("AZURE_STORAGE_KEY"):
            return _by_key(url, account, key).client
        if sas := environ.get("AZURE_STORAGE_SAS_TOKEN"):
            return _by_signature(url, sas).client
        return _by_identity(url).client


def _by_connection_string(text: str, name: str) -> Access:
    from azure.storage.blob import BlobServiceClient

    try:
        client = BlobServiceClient.from_connection_string(text, **_options())
    except ValueError:
        # Not what was wrong with it: it holds a key.
        raise ConnectionInvalid(
            f"{name} is none. Copy it from the storage account's access keys."
        ) from None
    return Access(client, hashlib.sha256(text.encode()).hexdigest())


def _by_signature(url: str, sas: str) -> Access:
    # A whole address with the signature in it is what some copy.
    token = sas.partition("?")[2] or sas
    return Access(_client(url, token), hashlib.sha256(token.encode()).hexdigest())


def _by_key(url: str, account: str, key: str) -> Access:
    name = account if "." not in account and "/" not in account else ""
    name = name or url.partition("://")[2].partition(".")[0]
    return Access(_client(url, {"account_name": name, "account_key": key}), f"{name} key")


def _by_identity(url: str, **of_whom: str | None) -> Access:
    from azure.identity import DefaultAzureCredential

    known = {name: value for name, value in of_whom.items() if value}
    return Access(_client(url, DefaultAzureCredential(**known)))


def _client(url: str, credential: Any) -> Any:
    from azure.storage.blob import BlobServiceClient

    return BlobServiceClient(url, credential, **_options())


def _options() -> dict[str, Any]:
    from azure.storage.blob import ExponentialRetry

    # Each request and answer is an information to the library, in Airflow's logs of tasks, too.
    logging.getLogger("azure").setLevel(logging.WARNING)
    connect_s, read_s = TIMEOUT
    return {
        "connection_timeout": connect_s,
        "read_timeout": read_s,
        "retry_policy": ExponentialRetry(**_TRIES),
        "max_single_get_size": _AT_A_TIME,
        "max_chunk_get_size": _AT_A_TIME,
        "max_single_put_size": PIECE,
    }


def _account_url(account: str) -> str:
    """``https://account.blob.core.windows.net`` of a name, a host, or a URL."""
    if not account or "://" in account:
        return account.rstrip("/")
    return f"https://{account}" if "." in account else f"https://{account}.blob.core.windows.net"


def _meaning(error: Exception, where: str, needed: int) -> StagingError:
    from azure.core.exceptions import ClientAuthenticationError, HttpResponseError

    status = getattr(error, "status_code", None)
    if not isinstance(error, HttpResponseError) or not status:
        text = str(error).partition("\n")[0].rstrip(".")
        if isinstance(error, ClientAuthenticationError):
            if _unanswered(error):
                return StagingError(
                    f"{where}: {text}. The credentials could not be fetched: see whether this host "
                    "has an identity and reaches its identity service."
                )
            return AccessDenied(f"{where}: {text}. Check the connection's identity and secret.")
        return StagingError(
            f"{where}: {text}. Check that the service runs and that this host reaches it."
        )
    code = getattr(error, "error_code", None) or error.reason or ""
    code = str(getattr(code, "value", code))
    said = f"{where}: {code} ({status})"
    if "MD5" in error.message and "match" in error.message:
        text = error.message.partition("\n")[0].rstrip(".")
        return TransferCorrupt(f"{said}: {text}: damaged on the way. Transfer it again.")
    if code in _ARCHIVED:
        return ObjectArchived(
            f"{said}: it is archived. Set its tier to Hot, Cool or Cold and wait, for hours maybe, "
            "until it is there; and keep the account's rules from archiving what is still read."
        )
    if code == "InvalidBlockList":  # of an upload that somebody else has ended
        return StagingError(f"{said}: its blocks are not there any more")
    return meaning_of_status(status, said, _RIGHTS, needed)


def _unanswered(error: BaseException) -> bool:
    """Whether an identity service did not answer, and so has not refused."""
    from azure.core.exceptions import ServiceRequestError, ServiceResponseError

    cause: BaseException | None = error
    while cause is not None:
        # Of several that it asks, the library tells what each said, and not the errors.
        silent = "no response from the IMDS endpoint" in str(cause)
        if silent or isinstance(cause, (ServiceRequestError, ServiceResponseError)):
            return True
        cause = cause.__cause__
    return False

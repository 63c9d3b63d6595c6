"""Objects of Google Cloud Storage, by Google's own library: the extra ``gcs``."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.storage.cloud import (
    CRC32C,
    TIMEOUT,
    CloudStore,
    Seen,
    Sink,
    Small,
    Take,
    library_of,
    meaning_of_status,
)
from ddl_airflow.storage.content_types import content_type
from ddl_airflow.storage.store import CHUNK, Access, StoredObject, once_for_an_environment

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_RIGHTS = "storage.objects.list and get, and for results create and delete"
_AT_ONCE = 64  # connections
_LARGEST_WAIT_S = 60.0  # in which the library makes one request again
_CHUNK = 8 * CHUNK  # sent at a time of a large object
_PAGE = 1_000  # objects of a listing at a time; no service gives more
_LISTED = "items(name,size,md5Hash,crc32c,updated),nextPageToken"
_NAMED = "items(name),prefixes,nextPageToken"
# What the provider of Google has besides: who wants it has another way.
_ONLY_THE_PROVIDERS = {
    "key_secret_name": "Google's secret manager. Give keyfile_dict or key_path",
    "credential_config_file": "a file of workload identity. Give it as key_path",
    "impersonation_chain": "another account's rights. Give key_path, a file that says so",
    "idp_issuer_url": "another identity provider. Give key_path, a file of workload identity",
}


class Google(NamedTuple):
    """What opens buckets.

    Attributes:
        library: its client.
        pays: the project that pays for what is asked of a bucket; None: the bucket's own.
    """

    library: Any
    pays: str | None = None


class GcsStore(CloudStore):
    """Objects of one bucket under one prefix.

    An object has a version, Google's generation. What is composed of others has no MD5: its ETag is
    its CRC32C.
    """

    scheme = "gs"

    @classmethod
    def client_of_environment(cls) -> Any:
        """As every tool of Google finds it; one client for all who ask."""
        return _client_of_environment()

    @classmethod
    def access_by(cls, connection: AirflowConnection) -> Access:
        """By a connection of type ``google_cloud_platform``: keyfile_dict, key_path or is_anonymous
        of its extra; else what every tool of Google finds. Its project pays, with requester_pays.

        ``api_endpoint`` is where another service answers, or Google's at a private address.
        """
        for name, wants in _ONLY_THE_PROVIDERS.items():
            if connection.text(name):
                raise ConnectionInvalid(
                    f"connection {connection.conn_id!r}: {name} asks for {wants}."
                )
        with _library():
            credentials = _credentials(connection)
            project = connection.text("project") or None
            client = _client(credentials, project, connection.text("api_endpoint"))
        pays = project if connection.is_set("requester_pays") else None
        # None of workload identity: of such callers nobody knows here who they are.
        who = str(getattr(credentials, "service_account_email", None) or "")
        return Access(Google(client, pays), "" if who == "default" else who)

    @property
    def endpoint(self) -> str:
        """Where the service answers."""
        return str(self._client.library.api_endpoint)

    @property
    def _bucket(self) -> Any:
        return self._client.library.bucket(self.bucket, user_project=self._client.pays)

    @contextmanager
    def _errors(self, key: str = "", needed: int = 0) -> Iterator[None]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
        from requests import RequestException
        from urllib3.exceptions import HTTPError

        known = (GoogleAPIError, GoogleAuthError, RequestException, HTTPError, InvalidResponse)
        try:
            yield
        except DataCorruption as error:
            raise TransferCorrupt(f"{self._where(key)}: {error}. Transfer it again.") from error
        except known as error:
            raise _meaning(error, self._where(key), needed) from error

    def _listed(self, start: str) -> Iterator[StoredObject]:
        for blob in self._pages(start, fields=_LISTED):
            yield StoredObject(blob.name, blob.size or 0, _etag(blob), blob.updated.timestamp())

    def _named(self, start: str) -> Iterable[str]:
        pages = self._pages(start, fields=_NAMED, delimiter="/")
        return [blob.name for blob in pages] + [*pages.prefixes]

    def _pages(self, start: str, **how: Any) -> Any:
        return self._client.library.list_blobs(
            self._bucket, prefix=start, page_size=_PAGE, timeout=TIMEOUT, retry=_retry(), **how
        )

    def _fetch(self, name: str, etag: str, start: int, count: int, take: Take) -> None:
        # As it is stored: what is stored compressed comes so, and is what the digests are of.
        self._bucket.blob(name).download_to_file(
            Sink(take),
            start=start,
            end=start + count - 1,
            raw_download=True,
            checksum=None,  # of a part there is none
            timeout=TIMEOUT,
            retry=None,
        )

    def _store(self, name: str, body: bytes | memoryview, md5: bytes) -> str:
        blob = self._bucket.blob(name)
        blob.upload_from_string(
            bytes(body), content_type(name), timeout=TIMEOUT, checksum="md5", retry=None
        )
        return _etag(blob)

    def _store_large(self, name: str, file: BinaryIO, size: int, seen: Seen) -> str:
        blob = self._bucket.blob(name, chunk_size=_CHUNK)
        # The library goes on at the byte that the service has, and sends the CRC32C at the end.
        blob.upload_from_file(
            _Reading(file, seen),
            size=size,
            content_type=content_type(name),
            timeout=TIMEOUT,
            checksum="crc32c",
            retry=_retry(),
        )
        return _etag(blob)

    def _copy(self, source: str, etag: str, name: str) -> str:
        found = self._bucket.get_blob(source, timeout=TIMEOUT, retry=_retry())
        if found is None or _etag(found) != etag:
            return ""
        blob, token = self._bucket.blob(name), None
        blob.content_type = content_type(name)
        while True:  # of much that is to go elsewhere a part at a time
            token, _, _ = blob.rewrite(
                found,
                token=token,
                if_source_generation_match=found.generation,
                timeout=TIMEOUT,
                retry=_retry(),
            )
            if token is None:
                return _etag(blob)

    def _small(self, name: str) -> Small:
        # First the generation, of which then each byte is: an answer need not say its own.
        blob = self._bucket.get_blob(name, timeout=TIMEOUT, retry=_retry())
        if blob is None:
            raise SourceMissing(f"gs://{self.bucket}/{name} at {self.endpoint}: no such object")
        etag, generation = _etag(blob), blob.generation
        # Not from the address that the answer names: the account's token would go there.
        body = self._bucket.blob(name).download_as_bytes(
            raw_download=True,
            if_generation_match=generation,
            timeout=TIMEOUT,
            retry=_retry(),
            checksum=None,
        )
        return Small(body, etag, str(generation))

    def _store_if(self, name: str, body: bytes, version: str | None) -> bool:
        from google.api_core.exceptions import PreconditionFailed

        try:
            self._bucket.blob(name).upload_from_string(
                body,
                content_type(name),
                if_generation_match=int(version or 0),  # 0: there is none
                timeout=TIMEOUT,
                checksum="md5",
                retry=None,
            )
        except PreconditionFailed:
            return False
        return True

    def _delete(self, name: str) -> None:
        self._bucket.blob(name).delete(timeout=TIMEOUT, retry=_retry())


class _Reading(io.RawIOBase):
    """The file to the library, which may go back in it; each byte is seen once."""

    def __init__(self, file: BinaryIO, seen: Seen) -> None:
        self._file, self._seen, self._furthest = file, seen, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1, /) -> bytes:
        start, chunk = self._file.tell(), b""
        # A file without a buffer may give less than is asked for.
        while len(chunk) < size and (more := self._file.read(size - len(chunk))):
            chunk += more
        if len(chunk) < size and start + len(chunk) < self._seen.size:
            self._seen.changed()
        new = start + len(chunk) - self._furthest
        if new > 0:
            self._seen.update(memoryview(chunk)[len(chunk) - new :])
            self._furthest += new
        return chunk


def _etag(blob: Any) -> str:
    if blob.md5_hash:
        return base64.b64decode(blob.md5_hash).hex()
    return CRC32C + base64.b64decode(blob.crc32c or "").hex()


def _retry() -> Any:
    from google.cloud.storage.retry import DEFAULT_RETRY

    return DEFAULT_RETRY.with_timeout(_LARGEST_WAIT_S)


@contextmanager
def _library() -> Iterator[None]:
    """Says what is missing, or wrong with what credentials are made of; not what is in them."""
    with library_of("gcs"):
        import_module("google.cloud.storage")  # else what it needs says first what it misses
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except GoogleAuthError as error:
            raise ConnectionInvalid(
                f"gs://: {error} Give keyfile_dict or key_path in the connection's extra; or set "
                "GOOGLE_APPLICATION_CREDENTIALS."
            ) from error


def _credentials(connection: AirflowConnection) -> Credentials:
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import GoogleAuthError

    found: Credentials
    if connection.is_set("is_anonymous"):
        return AnonymousCredentials()
    name = f"connection {connection.conn_id!r}"
    if given := connection.extra.get("keyfile_dict"):
        try:
            info = json.loads(given) if isinstance(given, str) else dict(given)
            found, _ = google.auth.load_credentials_from_dict(info, scopes=[_SCOPE])
        except (ValueError, TypeError, AttributeError, GoogleAuthError):
            # Not what was wrong with it: it holds a key.
            raise ConnectionInvalid(
                f"{name}: keyfile_dict is no key of a service account. Paste the whole JSON file."
            ) from None
    elif path := connection.text("key_path"):
        try:
            found, _ = google.auth.load_credentials_from_file(path, scopes=[_SCOPE])
        except (OSError, ValueError, GoogleAuthError):
            said = "is no key file" if os.path.isfile(path) else "is not there"
            raise ConnectionInvalid(f"{name}: key_path: {path} {said}, on this host.") from None
    else:
        found, _ = google.auth.default(scopes=[_SCOPE])
    return found


def _client(credentials: Any, project: str | None, endpoint: str) -> Any:
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud import storage
    from requests.adapters import HTTPAdapter

    session = AuthorizedSession(credentials)
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(_AT_ONCE, _AT_ONCE))
    return storage.Client(
        # Of buckets that are there nobody asks whose they are.
        project=project or "none",
        credentials=credentials,
        _http=session,
        client_options={"api_endpoint": endpoint} if endpoint else None,
    )


@once_for_an_environment
def _client_of_environment(environ: Mapping[str, str]) -> Google:
    with _library():
        if environ.get("STORAGE_EMULATOR_HOST"):
            from google.auth.credentials import AnonymousCredentials

            return Google(_client(AnonymousCredentials(), None, ""))
        import google.auth

        credentials, project = google.auth.default(scopes=[_SCOPE])
        return Google(_client(credentials, project, ""))


def _meaning(error: Exception, where: str, needed: int) -> StagingError:
    from google.api_core.exceptions import GoogleAPICallError, RetryError
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.cloud.storage.exceptions import InvalidResponse

    if isinstance(error, RetryError) and isinstance(error.cause, Exception):
        return _meaning(error.cause, where, needed)
    if isinstance(error, GoogleAuthError) and isinstance(error.__cause__, TransportError):
        return StagingError(
            f"{where}: {error}. The credentials could not be fetched: see whether this host "
            "reaches its metadata service, or what else gives them."
        )
    if isinstance(error, GoogleAuthError) and not isinstance(error, TransportError):
        return AccessDenied(
            f"{where}: {error} Check the connection's key, and this host's clock.",
            retryable=bool(getattr(error, "retryable", False)),
        )
    if isinstance(error, GoogleAPICallError) and error.code:
        # Without the request, which the library puts first.
        _, _, text = error.message.partition("\n")[0].partition(": ")
        status, text = int(error.code), text or error.message
    elif isinstance(error, InvalidResponse):
        status, text = error.response.status_code, str(error)
    else:
        return StagingError(
            f"{where}: {error}. Check that the service runs and that this host reaches it."
        )
    said = f"{where}: {text.rstrip('.')} ({status})"
    if status == 400 and "match" in text:  # "Provided MD5 hash … doesn't match calculated …"
        return TransferCorrupt(f"{said}: damaged on the way. Transfer it again.")
    return meaning_of_status(status, said, _RIGHTS, needed)

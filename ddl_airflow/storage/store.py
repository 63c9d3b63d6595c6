"""What the product asks of a place where objects lie: one bucket and prefix, or one folder."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import StagingError

# Called with each count of bytes moved; raises to stop the transfer that calls it.
Advance = Callable[[int], None]

CHUNK = 1024 * 1024  # bytes read at a time: the grain of progress and of stopping
PIECE = 16 * CHUNK  # bytes of which there is one digest in the cache
PART_PREFIX = ".ddl-part-"  # names of files still being written; no listing shows them
SUCCESS = "_SUCCESS"  # among published objects: that they are all there
RETIRED = "_RETIRED"  # a marker that cleaning took, so that nobody puts them into production


@dataclass(frozen=True, order=True)
class StoredObject:
    """One object as a listing shows it.

    Attributes:
        key: name relative to its store, parts separated by "/".
        size: bytes.
        etag: changes when the content does, without quotes. S3: the ETag. Folder: time and size.
        modified: seconds since 1970; no part of the identity.
        archived: the storage class, where it can be read only if somebody has restored it, which no
            listing says; else empty.
    """

    key: str
    size: int
    etag: str = ""
    modified: float = field(default=0.0, compare=False)
    archived: str = field(default="", compare=False)


class Fetched(NamedTuple):
    """What ``ObjectStore.get`` knows of the file that it wrote.

    Attributes:
        checked: how: "sha256", "crc64nvme", "crc32c", "crc32", "md5", "sha1"; with "-of-parts" by
            a digest of those of the parts; or "size" where the store offers nothing better.
        pieces: digests in hex of each piece of it; one, if there is no byte.
        algorithm: of these digests, as ``checksums.new`` has it: the one that the bytes were
            checked by, where that is of pieces as well, so that none is taken twice.
        piece_size: bytes.
        proved: what was found out of the content, as the lineage's listing has it: its ``sha256``
            or CRC in hex; or ``etag_is``, "md5", and the ``part_size`` in bytes where that is of
            parts.
    """

    checked: str
    pieces: list[str]
    algorithm: str = "sha256"
    piece_size: int = PIECE
    proved: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Unfinished:
    """An object that somebody began to store, and has not, or not yet.

    Attributes:
        key: relative to its store.
        started: seconds since 1970; or when it last grew.
        nbytes: that it takes, where the store says so.
        token: by which the store knows it.
    """

    key: str
    started: float
    nbytes: int
    token: str


class Left(NamedTuple):
    """What there may be of a file in a store already, which an earlier process put there.

    Attributes:
        store: that lists it.
        found: in that store, whole or not.
    """

    store: ObjectStore
    found: StoredObject | Unfinished


@dataclass(frozen=True)
class Access:
    """What opens a store; each kind takes of it what it needs.

    Attributes:
        client: of the store's protocol, where it has one: for S3 boto3's.
        access_key_id: whose keys the client has, where that is known; any name of who asks.
        within: folders out of which no link may lead, for folders; empty: the folder itself; None:
            links are followed.
        said: what stands for the client's endpoint in messages, if it is not to be shown.
    """

    client: Any = None
    access_key_id: str = ""
    within: Sequence[Path] | None = None
    said: str = ""


def once_for_an_environment(make: Callable[[Mapping[str, str]], Any]) -> Callable[[], Any]:
    """What makes a client of a process's environment, which all who ask then share.

    To make one takes tenths of a second, and a question about two models opens four places.
    """
    made = lru_cache(maxsize=1)(lambda environment: make(dict(environment)))
    return lambda: made(frozenset(os.environ.items()))


class StoreClass(Protocol):
    """What the class of an ``ObjectStore`` offers, so that its kind may name it."""

    def opened(self, uri: str, access: Access) -> ObjectStore:
        """The store that a URI of the kind names. Raises ConnectionInvalid if it names none."""

    def client_of_environment(self) -> Any:
        """The client that the protocol's own tools would use here; None where there is none."""

    def access_by(self, connection: AirflowConnection) -> Access:
        """What an Airflow connection opens it with, by its fields. Contacts nobody.

        Raises:
            ConnectionInvalid: one of them is missing, malformed, or asks for what only Airflow's
                own provider does.
        """


class ObjectStore(Protocol):
    """Objects under one bucket and prefix, or under one folder.

    Every call raises the errors of ``core.errors.StagingError`` and its subclasses, each naming the
    object and the store. An object is never visible half-written. May be used by many threads.
    Of two writers of one key the last wins, but for ``put_if``.
    """

    @property
    def uri(self) -> str:
        """``s3://bucket/prefix`` or ``file:///folder``, without a trailing slash."""

    @property
    def resolved_uri(self) -> str:
        """``uri``, or of a folder that is reached by links the one of where these lead now."""

    @property
    def endpoint(self) -> str:
        """The address of the service that has it; empty: none has."""

    @property
    def resumes(self) -> bool:
        """Whether ``get`` goes on with the file that an earlier one left when it was ended, and
        ``put`` with what an earlier one left in the store.
        """

    @property
    def caller(self) -> str:
        """A text equal for two stores only if the same keys open them; empty: nobody knows."""

    def at(self, prefix: str) -> ObjectStore:
        """The store of what lies under ``prefix``; "" is the store itself."""

    def list(self) -> list[StoredObject]:
        """All objects, sorted by key. Raises SourceMissing if there is no such bucket or folder."""

    def list_unless(self, digest: str) -> tuple[str, builtins.list[StoredObject] | None]:
        """All objects, unless the listing is still that of the digest.

        Args:
            digest: as an earlier call gave it; empty: there was none.

        Returns:
            The digest of the listing now, and its objects, sorted by key; None if it is the same
            digest, found out at a fraction of what ``list`` costs. Empty, where a store has none.
        """

    def names(self) -> builtins.list[str]:
        """What keys begin with, up to their first "/", sorted: found out without all the keys.

        Raises SourceMissing if there is no such bucket or folder.
        """

    def identity(self, obj: StoredObject) -> str:
        """A text equal for two objects only if their place and content are the same."""

    def check_access(self, obj: StoredObject) -> None:
        """Asks whether this caller may read the object; raises AccessDenied if not."""

    def get(self, obj: StoredObject, path: Path, advance: Advance) -> Fetched:
        """Writes a file, and checks it. Who wants it on disk flushes it.

        Args:
            obj: as it is listed.
            path: a name that nobody reads, and that ends in ".part". No file has it, but what an
                earlier call for the same object left, where the store ``resumes``.
            advance: called from any thread.

        Raises:
            TransferCorrupt: the bytes are not those listed.
            StagingError: also after as many tries as may help. The file may be left.
        """

    def read(self, obj: StoredObject, take: Callable[[bytes], object]) -> str:
        """Gives an object's content to ``take``, piece by piece, and writes nothing.

        Returns:
            As ``get``.

        Raises:
            TransferCorrupt: the bytes are not those listed: what ``take`` has is worth nothing.
        """

    def put(
        self, path: Path, key: str, sha256: str, advance: Advance, left: Sequence[Left] = ()
    ) -> StoredObject:
        """Stores a file whose digest (hex) is known, and checks what arrived.

        Args:
            path, key: what, and where to.
            sha256: the digest.
            advance: called from any thread.
            left: what there may be of it already; what is the same is not sent, where the store
                ``resumes``. An upload that goes on may be ended by this, and is begun again by
                whoever it belongs to.

        Raises:
            FileChanged: the file has another digest by now; nothing was stored.
        """

    def put_bytes(self, key: str, body: bytes) -> StoredObject:
        """Stores a small object."""

    def read_bytes(self, key: str) -> bytes:
        """A small object's content. Raises SourceMissing if there is none."""

    def read_version(self, key: str) -> tuple[bytes, str] | None:
        """A small object's content and which version of it that is; None if there is none."""

    def put_if(self, key: str, body: bytes, version: str | None) -> bool:
        """Stores a small object in place of that version of it, in one step.

        An answer that got lost on the way is asked for again: False may mean that this very call
        has stored it.

        Args:
            key: the object.
            body: its new content; no content that it had before.
            version: as ``read_version`` gave it; None: there is none.

        Returns:
            False, with nothing changed, if there is another version by now.
        """

    def exists(self, key: str) -> bool:
        """Whether there is such an object."""

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects; one that is not there is fine."""

    def unfinished(self) -> Iterator[Unfinished]:
        """What was begun and not ended: uploads in parts, files that are being written."""

    def discard(self, one: Unfinished) -> None:
        """Removes it; if it is not there any more that is fine."""


class ObjectSource(Protocol):
    """The part of an ``ObjectStore`` that a dataset is staged from; each member is as there."""

    @property
    def uri(self) -> str:
        """For messages and lineage."""

    @property
    def resumes(self) -> bool:
        """Whether ``get`` goes on with what is there."""

    @property
    def caller(self) -> str:
        """Whose keys open it."""

    def list(self) -> list[StoredObject]:
        """All objects."""

    def identity(self, obj: StoredObject) -> str:
        """Of place and content."""

    def check_access(self, obj: StoredObject) -> None:
        """Raises AccessDenied if the caller may not read it."""

    def get(self, obj: StoredObject, path: Path, advance: Advance) -> Fetched:
        """Writes a file."""


def why_archived(storage_class: str) -> str:
    """What to say of an object in an archive.

    Args:
        storage_class: its own; empty: nobody knows.
    """
    named = f", in storage class {storage_class}" if storage_class else ""
    return f"archived{named}: restore it before it can be read"


def why_archived_at(place: ObjectStore, key: str) -> str:
    """What to say of an object that a store has refused to read, for it is in an archive."""
    return why_archived(next((obj.archived for obj in place.list() if obj.key == key), ""))


def check_keys(keys: Iterable[str], uri: str) -> None:
    """Raises StagingError, not retryable, unless all keys can be files in one folder together."""
    files = set(keys)
    for key in files:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in key:
            raise _unusable(uri, key, "is no path inside a folder")
        try:
            longest = max(len(part.encode()) for part in parts)
        except UnicodeEncodeError:  # of a folder: Python has other bytes as halves of a character
            raise _unusable(uri, key, "is no text in UTF-8") from None
        if longest > 255:
            raise _unusable(uri, key, "has a part of over 255 bytes, too long for a file name")
        for depth in range(1, len(parts)):
            if (folder := "/".join(parts[:depth])) in files:
                raise _unusable(uri, key, f"needs a folder where {folder!r} is an object")


def _unusable(uri: str, key: str, why: str) -> StagingError:
    return StagingError(f"{uri}: key {key!r} {why}. Rename or remove the object.", retryable=False)

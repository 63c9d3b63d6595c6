"""What stores have in common that a cloud's own library opens; each cloud has a file of its own.

The library makes the requests. What is here holds each byte to the digest that the store lists,
goes on with what came of a file, and sends nothing that the store has already.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, NoReturn

from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    FileChanged,
    NoSpace,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.storage import checksums, lanes
from ddl_airflow.storage.download import Check, download, read_through
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.retries import Retries
from ddl_airflow.storage.store import (
    CHUNK,
    PIECE,
    Access,
    Advance,
    Fetched,
    Left,
    StoredObject,
    Unfinished,
)

TIMEOUT = (10.0, 30.0)  # seconds, to connect; and without a byte
_MOST_SAID = 200  # characters of an error
_LEAST_COPY = 64 * 1024  # bytes; what is smaller is sent as fast


class CloudStore(ABC):
    """Objects of one bucket under one prefix, which is a folder: ``a`` holds ``a/b``, not ``ab``.

    An ``etag`` is the MD5 in hex where the store lists one. So the same file, stored again, is the
    same data.

    Args:
        client: the library's.
        bucket, prefix: the place.
        who: a text equal for two clients only if the same keys open them; empty: nobody knows.
    """

    scheme: ClassVar[str]

    def __init__(self, client: Any, bucket: str, prefix: str = "", who: str = "") -> None:
        self._client, self._who = client, who
        self._retries = Retries()
        self.bucket, self.prefix = bucket, prefix.strip("/")
        self.uri = f"{self.scheme}://{bucket}/{self.prefix}".rstrip("/")

    @classmethod
    def opened(cls, uri: str, access: Access) -> CloudStore:
        """The objects of ``scheme://bucket[/prefix]``.

        Raises:
            ConnectionInvalid: there is no bucket in it, or no client.
        """
        bucket, _, prefix = uri.removeprefix(f"{cls.scheme}://").partition("/")
        if not bucket:
            raise ConnectionInvalid(f"{uri!r} names no store. Write {cls.scheme}://bucket/prefix")
        if access.client is None:
            raise ConnectionInvalid(f"{uri} needs a connection of Airflow. Write its conn_id.")
        return cls(access.client, bucket, prefix, access.access_key_id)

    # What each cloud does in its own way. Names of objects are whole: the prefix and the key.

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Where the store answers."""

    @abstractmethod
    def _errors(self, key: str = "", needed: int = 0) -> AbstractContextManager[None]:
        """Makes the library's errors ours. Needed: bytes that are to be stored."""

    @abstractmethod
    def _listed(self, start: str) -> Iterable[StoredObject]:
        """Objects whose names begin with ``start``, which their keys here do, too."""

    @abstractmethod
    def _named(self, start: str) -> Iterable[str]:
        """Names that begin with ``start``, each up to its next "/"."""

    @abstractmethod
    def _fetch(self, name: str, etag: str, start: int, count: int, take: Take) -> None:
        """Gives ``take`` bytes of an object from ``start`` on, by one request."""

    @abstractmethod
    def _store(self, name: str, body: bytes | memoryview, md5: bytes) -> str:
        """Stores a small object by one request that its MD5 goes with. Returns its ETag."""

    @abstractmethod
    def _store_large(self, name: str, file: BinaryIO, size: int, seen: Seen) -> str:
        """Stores a file, of which ``seen`` gets each byte before the object is there, and may
        raise. Returns its ETag.
        """

    @abstractmethod
    def _copy(self, source: str, etag: str, name: str) -> str:
        """Has the store copy an object of the bucket, if it is still that. Returns its ETag."""

    @abstractmethod
    def _small(self, name: str) -> Small:
        """An object's content."""

    @abstractmethod
    def _store_if(self, name: str, body: bytes, version: str | None) -> bool:
        """As ``ObjectStore.put_if``."""

    @abstractmethod
    def _delete(self, name: str) -> None:
        """Removes an object. May raise SourceMissing."""

    # What ``ObjectStore`` says.

    @property
    def resolved_uri(self) -> str:
        """The same: there are no links."""
        return self.uri

    @property
    def resumes(self) -> bool:
        """What came of a large object is kept."""
        return True

    @property
    def caller(self) -> str:
        """A digest of endpoint and account, where that is known."""
        if not self._who:
            return ""
        return hashlib.sha256(f"{self.endpoint} {self._who}".encode()).hexdigest()[:32]

    def at(self, prefix: str) -> CloudStore:
        """The store of a longer prefix."""
        return type(self)(self._client, self.bucket, f"{self.prefix}/{prefix}", self._who)

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    def _where(self, key: str) -> str:
        return f"{self.uri}/{key} at {self.endpoint}" if key else f"{self.uri} at {self.endpoint}"

    def list(self) -> list[StoredObject]:
        """All objects under the prefix, sorted by key."""
        start = self._name("")
        with self._listing():
            return sorted(_below(start, self._listed(start)))

    @contextmanager
    def _listing(self, key: str = "") -> Iterator[None]:
        """Makes an error of an answer that is no listing: the libraries stumble over a proxy's."""
        try:
            with self._errors(key):
                yield
        except (AttributeError, TypeError, ValueError) as error:
            raise StagingError(
                f"{self._where(key)}: the answer is no listing: {type(error).__name__}: "
                f"{str(error)[:_MOST_SAID].rstrip('.')}. See what the store, or a proxy, sends."
            ) from error

    def list_unless(self, digest: str) -> tuple[str, builtins.list[StoredObject] | None]:
        """All objects: the library has read the whole listing before anybody could compare it."""
        return "", self.list()

    def names(self) -> builtins.list[str]:
        """What keys begin with, as the store puts them together."""
        start = self._name("")
        with self._listing():
            found = {name[len(start) :].partition("/")[0] for name in self._named(start)}
        return sorted(found)

    def identity(self, obj: StoredObject) -> str:
        """Endpoint, bucket, whole name, ETag and size."""
        return json.dumps([self.endpoint, self.bucket, self._name(obj.key), obj.etag, obj.size])

    def check_access(self, obj: StoredObject) -> None:
        """Reads one byte of it, or asks for what is listed of an empty one."""
        if obj.size:
            self._source(obj).read(0, memoryview(bytearray(1)), _nothing)
        elif not self.exists(obj.key):
            raise SourceMissing(f"{self._where(obj.key)}: no such object.")

    def get(self, obj: StoredObject, path: Path, advance: Advance) -> Fetched:
        """Fetches it in ranges, tries those again that fail, and compares with what is listed."""
        with os_errors(path, obj.size):
            return download(self._source(obj), obj.size, path, advance)

    def read(self, obj: StoredObject, take: Callable[[bytes], object]) -> str:
        """The same, one range after the other, and nothing is written."""
        return read_through(self._source(obj), obj.size, take)

    def _source(self, obj: StoredObject) -> _Source:
        return _Source(self, obj)

    def put(
        self, path: Path, key: str, sha256: str, advance: Advance, left: Sequence[Left] = ()
    ) -> StoredObject:
        """Uploads, or has the store copy what it has; the MD5 is compared with what is stored."""
        counted = 0

        def proceed(count: int) -> None:
            nonlocal counted
            new = max(0, count - counted)  # what is sent again counts once
            counted += new
            advance(new)

        with os_errors(path), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            where = self._where(key)
            etag = self._copied(
                file, key, Seen(path, where, size, sha256, lambda _: advance(0)), left
            ) or self._sent(file, key, lambda: Seen(path, where, size, sha256, proceed))
        proceed(size)
        return StoredObject(key, size, etag)

    def _copied(self, file: BinaryIO, key: str, seen: Seen, left: Sequence[Left]) -> str:
        """The ETag of what the store copied; empty if it has nothing to copy."""
        there = {
            one.found.etag: one.store._name(one.found.key)
            for one in left
            if isinstance(one.found, StoredObject)
            and isinstance(one.store, type(self))
            and one.store.bucket == self.bucket
        }
        if seen.size < _LEAST_COPY or not there:
            return ""
        while chunk := file.read(CHUNK):
            seen.update(chunk)
        if (source := there.get(seen.md5.hex())) is None:
            return ""
        with suppress(StagingError), self._errors(key, seen.size):
            return self._copy(source, seen.md5.hex(), self._name(key))
        return ""

    def _sent(self, file: BinaryIO, key: str, begin: Callable[[], Seen]) -> str:
        etag = ""

        def send() -> None:
            nonlocal etag
            file.seek(0)
            seen = begin()
            with self._errors(key, seen.size):
                if seen.size >= PIECE:
                    etag = self._store_large(self._name(key), file, seen.size, seen)
                else:
                    with lanes.buffers.one(seen.size, seen.wait) as body:
                        seen.update(_filled(file, body, seen))
                        etag = self._store(self._name(key), body, seen.md5)
            if etag != seen.md5.hex():
                raise TransferCorrupt(
                    f"{self._where(key)}: stored with MD5 {etag}, not {seen.md5.hex()}. Transfer "
                    "it again."
                )

        self._tried(send, begin().wait)
        return etag

    def _tried(self, send: Callable[[], None], advance: Advance) -> None:
        """In as many tries as may help; once more for wrong bytes."""
        damaged = False

        def once() -> None:
            nonlocal damaged
            try:
                send()
            except TransferCorrupt as error:
                if damaged or isinstance(error, FileChanged):
                    raise
                damaged = True
                raise StagingError(str(error)) from error

        self._retries.tried(once, advance, lambda: "It was not stored")

    def put_bytes(self, key: str, body: bytes) -> StoredObject:
        """Stores a small object in one request; the store checks its MD5."""
        md5, etag = hashlib.md5(body, usedforsecurity=False).digest(), ""

        def send() -> None:
            nonlocal etag
            with self._errors(key, len(body)):
                etag = self._store(self._name(key), body, md5)

        self._tried(send, _nothing)
        return StoredObject(key, len(body), etag)

    def read_bytes(self, key: str) -> bytes:
        """A small object's content."""
        return self._read(key)[0]

    def _read(self, key: str) -> tuple[bytes, str]:
        """Content and version; again where it was replaced between a look at it and its content."""
        found = Small(b"", "", "")

        def once() -> None:
            nonlocal found
            try:
                with self._errors(key):
                    found = self._small(self._name(key))
            except TransferCorrupt as error:
                raise StagingError(str(error)) from error
            md5 = hashlib.md5(found.body, usedforsecurity=False).hexdigest()
            if is_md5(found.etag) and md5 != found.etag:
                raise StagingError(
                    f"{self._where(key)}: {len(found.body):,} bytes came with MD5 {md5}, not "
                    f"{found.etag}"
                )

        self._retries.tried(once, _nothing, lambda: "It was not read")
        return found.body, found.version

    def read_version(self, key: str) -> tuple[bytes, str] | None:
        """A small object's content and its version."""
        try:
            return self._read(key)
        except SourceMissing:
            if not self._bucket_is_there():
                raise
            return None

    def _bucket_is_there(self) -> bool:
        with suppress(SourceMissing), self._listing():
            next(iter(self._listed(self._name(""))), None)
            return True
        return False

    def put_if(self, key: str, body: bytes, version: str | None) -> bool:
        """Stores it on the condition, which the store heeds in one step."""
        tries, done = 0, False

        def send() -> None:
            nonlocal tries, done
            tries += 1
            with self._errors(key, len(body)):
                done = self._store_if(self._name(key), body, version)

        self._tried(send, _nothing)
        if not done and tries > 1:  # it may have been ours, in a try whose answer was lost
            now = self.read_version(key)
            done = now is not None and now[0] == body
        return done

    def exists(self, key: str) -> bool:
        """Whether there is such an object. By listing: only that tells of a missing bucket."""
        with self._listing(key):
            found = next(iter(self._listed(self._name(key))), None)
        # Names come sorted, so the name itself is the first that begins so.
        return found is not None and found.key == self._name(key)

    def delete(self, keys: Iterable[str]) -> None:
        """Removes one by one."""
        for key in keys:
            with suppress(SourceMissing), self._errors(key):
                self._delete(self._name(key))

    def unfinished(self) -> Iterator[Unfinished]:
        """None: what was begun and not ended shows in no listing, and the store drops it after a
        week. Sources: Cloud Storage, Resumable uploads; Azure Blob Storage, Put Block.
        """
        return iter(())

    def discard(self, one: Unfinished) -> None:
        """Is not called: ``unfinished`` names none."""
        raise AssertionError(one)


Take = Callable[[bytes | memoryview], object]


class Small(NamedTuple):
    """A small object.

    Attributes:
        body: its content.
        etag: as its listing has it.
        version: by what ``_store_if`` knows it.
    """

    body: bytes
    etag: str
    version: str


@contextmanager
def library_of(extra: str) -> Iterator[None]:
    """Says which extra brings what cannot be imported. Raises ConnectionInvalid."""
    try:
        yield
    except ImportError as error:
        raise ConnectionInvalid(
            f"type {extra} needs a library that is not here: {error}. Install ddl-airflow with the "
            f"extra {extra} where tasks run."
        ) from error


def meaning_of_status(status: int, said: str, rights: str, needed: int) -> StagingError:
    """The error that an answer stands for.

    Args:
        status: of HTTP.
        said: the object, the store, and what it called the error.
        rights: that the account needs.
        needed: bytes that were to be stored.
    """
    if status == 404:
        return SourceMissing(f"{said}. Upload it, or correct bucket, prefix or connection.")
    if status in (401, 403):
        return AccessDenied(
            f"{said}. Check the connection's account and key, its rights ({rights}), and this "
            "host's clock."
        )
    if status in (412, 416):
        return TransferCorrupt(f"{said}: changed since it was listed.")
    if status == 507:
        return NoSpace(f"{said}: {needed:,} bytes to store. Free space there.")
    # A success that is none of the operation's is some proxy's.
    return StagingError(said, retryable=status < 300 or status >= 500 or status in (408, 429))


class Seen:
    """The bytes of a file so far, which must have a SHA-256 at the end.

    Args:
        path, where: of the file and the object, for the error.
        size: bytes of the file.
        sha256: in hex.
        proceed: called with the count so far; raises to stop.
    """

    def __init__(self, path: Path, where: str, size: int, sha256: str, proceed: Advance) -> None:
        self._path, self._where, self.size, self._expected = path, where, size, sha256
        self._proceed = proceed
        self._count = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._sha256 = hashlib.sha256()

    def update(self, chunk: bytes | memoryview, /) -> None:
        """Takes the next bytes. Raises FileChanged at the end of a file that is another one."""
        self._md5.update(chunk)
        self._sha256.update(chunk)
        self._count += len(chunk)
        if self._count >= self.size and (
            self._count > self.size or self._sha256.hexdigest() != self._expected
        ):
            self.changed()
        self._proceed(self._count)

    def wait(self, _: int) -> None:
        """Raises if this is to be stopped."""
        self._proceed(0)

    def changed(self) -> NoReturn:
        """Raises FileChanged."""
        raise FileChanged(f"{self._path} changed while it was uploaded to {self._where}")

    @property
    def md5(self) -> bytes:
        """Of the bytes so far."""
        return self._md5.digest()


class Sink(io.RawIOBase):
    """A file to a library, which gives away what is written."""

    def __init__(self, take: Take) -> None:
        self._take = take

    def writable(self) -> bool:
        return True

    def write(self, chunk: Any, /) -> int:
        self._take(chunk)
        return len(chunk)


class _Source:
    """An object of such a store: ``download.Source``."""

    def __init__(self, store: CloudStore, obj: StoredObject) -> None:
        self._store, self._obj = store, obj

    def read(self, start: int, into: memoryview, advance: Advance) -> None:
        """Fills ``into``. What came before a failure is kept, and the rest asked for."""
        at = 0

        def take(chunk: bytes | memoryview) -> None:
            nonlocal at
            if at + len(chunk) > len(into):
                raise self.corrupt(f"more came than the {len(into):,} bytes that were asked for")
            into[at : at + len(chunk)] = chunk
            at += len(chunk)
            advance(len(chunk))

        def once() -> None:
            with self._store._errors(self._obj.key):
                name = self._store._name(self._obj.key)
                self._store._fetch(name, self._obj.etag, start + at, len(into) - at, take)
            if at < len(into):
                raise StagingError(
                    f"{self._store._where(self._obj.key)}: the answer ended {len(into) - at:,} "
                    "bytes too early"
                )

        if into:
            self._store._retries.tried(
                once, advance, lambda: f"{at:,} of {len(into):,} bytes came from byte {start:,} on"
            )

    def check(self) -> Check:
        """By what the store lists."""
        etag = self._obj.etag
        if is_md5(etag):
            return Check("md5", hashlib.md5(usedforsecurity=False), etag)
        if etag.startswith(CRC32C):
            return Check("crc32c", checksums.new("crc32c"), etag.removeprefix(CRC32C))
        return Check("size")

    def corrupt(self, why: str) -> TransferCorrupt:
        """The error that names the object."""
        return TransferCorrupt(f"{self._store._where(self._obj.key)}: {why}. Transfer it again.")


CRC32C = "crc32c-"  # before the value in hex: the ETag of an object that has no MD5


def is_md5(etag: str) -> bool:
    """Whether it is a digest of the content, and no version's name."""
    return re.fullmatch("[0-9a-f]{32}", etag) is not None


def _below(start: str, found: Iterable[StoredObject]) -> Iterator[StoredObject]:
    for obj in found:
        yield StoredObject(obj.key[len(start) :], obj.size, obj.etag, obj.modified, obj.archived)


def _filled(file: BinaryIO, body: memoryview, seen: Seen) -> memoryview:
    """All of a file that fits. Anything less has changed."""
    at = 0
    while at < len(body):
        if not (count := file.readinto(body[at:])):  # type: ignore[attr-defined]
            seen.changed()
        at += count
    return body


def _nothing(_: int) -> None:
    """Nobody counts."""

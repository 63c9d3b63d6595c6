"""Digests: of a listing, of a file, and what a multipart upload gets of its parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from json.encoder import encode_basestring_ascii as _quoted
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from ddl_airflow.storage import checksums
from ddl_airflow.storage.checksums import Checksum
from ddl_airflow.storage.store import CHUNK, ObjectStore, StoredObject


class Digest(Protocol):
    """What takes bytes in their order."""

    def update(self, chunk: bytes | memoryview, /) -> None:
        """Takes the next bytes."""


def fingerprint(listing: Iterable[StoredObject]) -> str:
    """``sha256:<hex>`` of the sorted keys, sizes and ETags.

    Equal for equal data in two buckets; different as soon as one object is added, removed or
    changed. No object is read for it.
    """
    # As json.dumps would write each, at a third of its time: there may be millions.
    lines = (
        f"[{_quoted(obj.key)}, {obj.size}, {_quoted(obj.etag)}]\n"
        for obj in sorted(listing, key=attrgetter("key"))
    )
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def file_sha256(path: Path) -> tuple[str, int]:
    """A file's SHA-256 in hex, and its size in bytes."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb") as source:
        while chunk := source.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def object_sha256(store: ObjectStore, obj: StoredObject) -> str:
    """An object's SHA-256 in hex. Raises as ``ObjectStore.read``."""
    digest = hashlib.sha256()
    store.read(obj, digest.update)
    return digest.hexdigest()


class Parts:
    """The digests of consecutive parts of a size, the last of which may be smaller.

    Args:
        part_size: bytes; or those of each part.
        new: begins a digest.
    """

    def __init__(self, part_size: int | Iterable[int], new: Callable[[], Checksum]) -> None:
        self._sizes = repeat(part_size) if isinstance(part_size, int) else iter(part_size)
        self._new = new
        self._parts: list[bytes] = []
        self._part = new()
        self._room = next(self._sizes)

    def update(self, chunk: bytes | memoryview) -> None:
        """Takes the next bytes, which may span parts."""
        view = memoryview(chunk)
        while view:
            if not self._room:
                self._end_part()
            taken = view[: self._room]
            self._part.update(taken)
            self._room -= len(taken)
            view = view[len(taken) :]

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part = self._new()
        self._room = next(self._sizes)

    def digests(self) -> list[bytes]:
        """Of the parts so far; of no bytes at all there is one."""
        return [*self._parts, self._part.digest()]


def of_parts(algorithm: str, parts: Sequence[bytes]) -> str:
    """The digest of the digests of parts, in hex, a hyphen, and the number of parts.

    By MD5 it is the ETag of a multipart upload. Sources: Amazon S3 and Ceph; Amazon S3's user
    guide, Checking object integrity, composite checksums.
    """
    return f"{checksums.hex_of(algorithm, b''.join(parts))}-{len(parts)}"


class DigestOfParts(Parts):
    """``of_parts`` of all bytes so far."""

    def __init__(self, part_size: int | Iterable[int], algorithm: str = "md5") -> None:
        super().__init__(part_size, lambda: checksums.new(algorithm))
        self._algorithm = algorithm

    def hexdigest(self) -> str:
        """As a store writes it."""
        return of_parts(self._algorithm, self.digests())

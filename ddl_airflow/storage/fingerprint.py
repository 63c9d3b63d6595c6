"""Digests: of a listing, of a file, and the ETag that a multipart upload gets."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from json.encoder import encode_basestring_ascii as _quoted
from operator import attrgetter
from pathlib import Path
from typing import Protocol

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

    def __init__(self, part_size: int | Iterable[int], new: Callable[[], hashlib._Hash]) -> None:
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


class PartsMd5(Parts):
    """The MD5 of the parts' MD5s, a hyphen, and the number of parts.

    Source: the ETag of a multipart upload, as Amazon S3 and Ceph compute it.
    """

    def __init__(self, part_size: int | Iterable[int]) -> None:
        super().__init__(part_size, partial(hashlib.md5, usedforsecurity=False))

    def hexdigest(self) -> str:
        """The ETag of all bytes so far."""
        parts = self.digests()
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"

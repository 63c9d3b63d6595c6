"""Checksums of bytes: those that S3 has beside MD5, and what hashlib has.

By SIMD a CRC takes a small part of MD5's time. It tells what a line, a host or a disk has changed,
and not what somebody has forged.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ddl_airflow.core.errors import ConnectionInvalid

# As S3 calls them in lower case, the best first of those that are quick.
CRCS = ("crc64nvme", "crc32c", "crc32")
OF_S3 = ("sha256", *CRCS, "sha1")
HASHES = ("md5", "sha1", "sha256")
DIGITS = {"sha256": 64, "crc64nvme": 16, "crc32c": 8, "crc32": 8, "sha1": 40}  # in hex
OF_PIECES = "crc64nvme"  # where nobody asks for another one


class Checksum(Protocol):
    """A digest of the bytes so far, as hashlib's."""

    def update(self, chunk: bytes | memoryview, /) -> None:
        """Takes the next bytes."""

    def digest(self) -> bytes:
        """Of the bytes so far."""

    def hexdigest(self) -> str:
        """The same in hex."""


def _crc(algorithm: str) -> Callable[[bytes | memoryview, int], int]:
    """Goes on with the CRC of the bytes before."""
    if algorithm == "crc32":
        return zlib.crc32  # twice as fast as awscrt's
    found: Callable[[bytes | memoryview, int], int] = getattr(_by_simd(), algorithm)
    return found


def _by_simd() -> Any:
    try:
        from awscrt import checksums  # only who transfers needs it
    except ImportError as error:
        raise ConnectionInvalid(
            f"Checksums of data need the package awscrt, which cannot be imported: {error}. "
            "Install it where tasks run: pip install awscrt."
        ) from error
    return checksums


class _Crc:
    def __init__(self, algorithm: str) -> None:
        self._next, self._value = _crc(algorithm), 0
        self._nbytes = 8 if algorithm == "crc64nvme" else 4

    def update(self, chunk: bytes | memoryview, /) -> None:
        self._value = self._next(chunk, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(self._nbytes, "big")

    def hexdigest(self) -> str:
        return self.digest().hex()


def new(algorithm: str) -> Checksum:
    """Of no bytes yet. Raises ValueError where it is not known."""
    if algorithm in CRCS:
        return _Crc(algorithm)
    return hashlib.new(algorithm, usedforsecurity=False)


def hex_of(algorithm: str, content: bytes | memoryview) -> str:
    """That of some bytes."""
    found = new(algorithm)
    found.update(content)
    return found.hexdigest()


def joined(algorithm: str, parts: Sequence[bytes], sizes: Sequence[int]) -> bytes:
    """The CRC of bytes, made of those of their parts, and the bytes that each part has."""
    join, value = getattr(_by_simd(), f"combine_{algorithm}"), 0
    for part, size in zip(parts, sizes, strict=True):
        value = join(value, int.from_bytes(part, "big"), size)
    return int(value).to_bytes(len(parts[0]), "big")

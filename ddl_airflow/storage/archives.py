"""Archives, file by file. Nothing in one is trusted: it is anybody's who may write to a bucket.

What is no regular file or folder, leads out of the folder, or is there twice is refused, and so is
an archive that is cut off, is damaged, or goes on after its end: no file of it is left out
silently. Python's ``tarfile`` takes a header that it cannot read for the end, and reads as much of
headers into memory as they say that they have: both are looked after here.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from ddl_airflow.core.errors import StagingError
from ddl_airflow.storage.store import CHUNK, check_keys

_MOST_OF_HEADERS = 16 * CHUNK  # bytes between two files, and after the last
_MOST_MEMORY = 256 * CHUNK  # bytes, to unpack LZMA, which may ask for 4 GiB; `xz -9` for 65 MiB


class _Xz(io.RawIOBase):
    """What an xz file holds, from its start to its end, in ``_MOST_MEMORY``.

    ``lzma.open`` has no limit, and what it cannot read after one stream is the end to it.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._stream = self._new()
        self._at = 0

    @staticmethod
    def _new() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(memlimit=_MOST_MEMORY)

    def readinto(self, into: Any, /) -> int:
        chunk, size = b"", len(memoryview(into).cast("B"))
        while not chunk:
            block = b""
            if self._stream.eof:  # another one may follow, after zeros
                block = self._stream.unused_data.lstrip(b"\0")
                while not block and (more := self._file.read(CHUNK)):
                    block = more.lstrip(b"\0")
                if not block:
                    return 0
                self._stream = self._new()
            elif self._stream.needs_input and not (block := self._file.read(CHUNK)):
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            chunk = self._stream.decompress(block, size)
        into[: len(chunk)] = chunk
        self._at += len(chunk)
        return len(chunk)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Reads on to there: nobody goes back."""
        if whence != io.SEEK_SET or offset < self._at:
            raise io.UnsupportedOperation("seek")
        while self._at < offset and self.read(min(CHUNK, offset - self._at)):
            pass
        return self._at

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self._file.close()
        super().close()


_TAR: dict[str, Callable[[Path], Any]] = {
    ".tar": partial(open, mode="rb"),
    ".tar.gz": gzip.open,
    ".tgz": gzip.open,
    ".tar.bz2": bz2.open,
    ".tbz2": bz2.open,
    ".tar.xz": lambda path: io.BufferedReader(_Xz(path)),
    ".txz": lambda path: io.BufferedReader(_Xz(path)),
}
_ZIP = (".zip",)
_ZIP_END, _ZIP_END_BYTES = b"PK\5\6", 22  # without its comment
SUFFIXES = (*_TAR, *_ZIP)
# Python reads it from 3.14 on.
_NOT_READ = (".tar.zst", ".tzst")


class ArchiveRefused(StagingError):
    """An archive that is not unpacked; the message names it, and what of it is wrong."""

    retryable = False


class Member(NamedTuple):
    """One file of an archive.

    Attributes:
        name: its path in the archive, parts separated by "/".
        size: bytes, as the archive says.
        chunks: its content, at most once, before the next member is asked for. Raises
            ArchiveRefused if it is not what the archive says.
    """

    name: str
    size: int
    chunks: Iterator[bytes]


def suffix_of(key: str) -> str:
    """What makes a key that of an archive, as it is written there; empty: it is none."""
    lower = key.lower()
    found = next((one for one in (*SUFFIXES, *_NOT_READ) if lower.endswith(one)), "")
    return key[len(key) - len(found) :] if found else ""


def members(path: Path, where: str, suffix: str) -> Iterator[Member]:
    """Yields the files of an archive, in its order.

    Args:
        path: of the archive.
        where: what messages call it.
        suffix: as ``suffix_of`` has it.

    Raises:
        ArchiveRefused: it is no archive, a damaged one, or has what may not be unpacked.
    """
    kind = suffix.lower()
    if kind in _NOT_READ:
        raise ArchiveRefused(
            f"{where}: archives of this kind cannot be unpacked. Pack it as one of "
            f"{', '.join(SUFFIXES)}, or leave it out by training_data_reference.exclude."
        )
    with _readable(where):
        found = _of_zip(path, where) if kind in _ZIP else _of_tar(path, where, _TAR[kind])
        seen: set[str] = set()
        for member in found:
            if member.name in seen:
                raise _refused(where, member.name, "is there twice")
            if member.size < 0:
                raise _refused(where, member.name, "has a negative size")
            seen.add(member.name)
            yield member


def _of_tar(path: Path, where: str, opened: Callable[[Path], Any]) -> Iterator[Member]:
    with opened(path) as file:
        source = _Bounded(file, where)
        # Attributes of files may be any bytes; of names that is refused with all keys.
        with tarfile.open(
            fileobj=cast(BinaryIO, source), mode="r:", encoding="utf-8", errors="surrogateescape"
        ) as archive:
            while (one := archive.next()) is not None:
                # Else it keeps all of them, and what headers say of all.
                archive.members = []  # type: ignore[attr-defined]
                archive.pax_headers = {}
                if one.isdir():
                    _checked(one.name, where)
                    source.renew()
                    continue
                if not one.isreg():
                    kind = "a link" if one.issym() or one.islnk() else "no regular file"
                    raise _refused(where, one.name, f"is {kind}")
                name = _checked(one.name, where)
                content = archive.extractfile(one)
                assert content is not None  # of a regular file
                source.unbounded()
                yield Member(name, one.size, _chunks(content, name, one.size, where))
                source.renew()
        source.check_end()


def _of_zip(path: Path, where: str) -> Iterator[Member]:
    with zipfile.ZipFile(path) as archive:
        _check_ends(path, where, archive)
        for one in archive.infolist():
            mode = one.external_attr >> 16
            if one.is_dir():
                _checked(one.filename, where)
                continue
            if stat.S_ISLNK(mode):
                raise _refused(where, one.filename, "is a link")
            if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
                raise _refused(where, one.filename, "is no regular file")
            if one.flag_bits & 1:
                raise _refused(where, one.filename, "is encrypted")
            name = _checked(one.filename, where)
            if one.compress_type == zipfile.ZIP_LZMA:
                _check_memory(path, where, one)
            with archive.open(one) as content:
                yield Member(name, one.file_size, _chunks(content, name, one.file_size, where))


def _check_memory(path: Path, where: str, one: zipfile.ZipInfo) -> None:
    """Python has no limit here. Source: APPNOTE.TXT 4.3.7, Local file header, and 5.8.8, LZMA."""
    with path.open("rb") as file:
        file.seek(one.header_offset)
        header = file.read(30)
        name, more = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        file.seek(name + more, os.SEEK_CUR)
        dictionary = int.from_bytes(file.read(9)[5:], "little")
    if dictionary > _MOST_MEMORY:
        raise _too_much_memory(where)


def _too_much_memory(where: str) -> ArchiveRefused:
    return ArchiveRefused(
        f"{where}: cannot be unpacked: it needs more than {_MOST_MEMORY // CHUNK} MiB of memory. "
        "Pack it anew with a smaller dictionary; `xz -9` has one of 64 MiB."
    )


def _check_ends(path: Path, where: str, archive: zipfile.ZipFile) -> None:
    """Raises ArchiveRefused unless the archive is the whole file: Python's finds the last of many.

    Source: APPNOTE.TXT 4.3.16, End of central directory record.
    """
    first = min((one.header_offset for one in archive.infolist()), default=0)
    if first > 0:
        raise ArchiveRefused(
            f"{where}: cannot be unpacked: there are {first:,} bytes before its first file. Is it "
            "several in one, or a program? Pack it anew."
        )
    record = _ZIP_END_BYTES + len(archive.comment)
    with path.open("rb") as file:
        file.seek(-record, os.SEEK_END)
        if file.read(len(_ZIP_END)) != _ZIP_END:
            raise ArchiveRefused(
                f"{where}: cannot be unpacked: it goes on after its end. Pack it anew."
            )


def _chunks(content: IO[bytes], name: str, size: int, where: str) -> Iterator[bytes]:
    """All bytes. Whatever the archive says of its size, no more of it is read."""
    left = size
    with _readable(where, name):
        while left and (chunk := content.read(min(CHUNK, left))):
            left -= len(chunk)
            yield chunk
        # Of a ZIP this is when its checksum is compared.
        if left or content.read(1):
            raise _refused(where, name, f"is not of {size:,} bytes, as the archive says")


def _checked(name: str, where: str) -> str:
    """The name without a dot in front, as ``tar cf x.tar .`` writes it, and a slash at its end."""
    if name.startswith("/"):
        raise _refused(where, name, "is an absolute path")
    name = name.removesuffix("/")
    while name.startswith("./"):
        name = name[2:].lstrip("/")
    if name in ("", "."):
        return ""
    if ".." in name.split("/"):
        raise _refused(where, name, "leads out of the folder")
    try:
        check_keys([name], where)
    except StagingError as error:
        raise ArchiveRefused(f"{where}: cannot be unpacked: {error}") from error
    return name


def _refused(where: str, name: str, why: str) -> ArchiveRefused:
    return ArchiveRefused(
        f"{where}: cannot be unpacked: {name[:200]!r} {why}. Pack it anew, without, or leave the "
        "archive out by training_data_reference.exclude."
    )


@contextmanager
def _readable(where: str, name: str = "") -> Iterator[None]:
    """Turns what the libraries raise of a damaged archive into ArchiveRefused."""
    try:
        yield
    except (
        *(tarfile.TarError, zipfile.BadZipFile, lzma.LZMAError, zlib.error, gzip.BadGzipFile),
        *(EOFError, NotImplementedError, RecursionError, UnicodeError, OverflowError, ValueError),
    ) as error:
        if isinstance(error, lzma.LZMAError) and "Memory usage limit" in str(error):
            raise _too_much_memory(where) from error
        of = f"{name[:200]!r}: " if name else ""
        raise ArchiveRefused(
            f"{where}: cannot be unpacked: {of}{error or type(error).__name__}. It is no archive "
            "of this kind, cut off, or damaged: pack and upload it anew."
        ) from error
    except OSError as error:
        if error.errno is not None:  # of the disk, not of what is read
            raise
        raise ArchiveRefused(
            f"{where}: cannot be unpacked: {error}. It is no archive of this kind, cut off, or "
            "damaged: pack and upload it anew."
        ) from error


class _Bounded(io.RawIOBase):
    """What ``tarfile`` reads headers from: no more at once, nor between two files, than a bound."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        self._file, self._where = file, where
        self._left: int | None = _MOST_OF_HEADERS
        self._last = b""

    def renew(self) -> None:
        """A header follows."""
        self._left = _MOST_OF_HEADERS

    def unbounded(self) -> None:
        """The content of a file follows, of which ``_chunks`` takes little at once."""
        self._left = None

    def read(self, size: int = -1) -> bytes:
        if self._left is not None:
            if size < 0 or size > self._left:
                raise ArchiveRefused(
                    f"{self._where}: cannot be unpacked: it has more than "
                    f"{_MOST_OF_HEADERS // CHUNK} MiB between two files. Pack it anew."
                )
            self._left -= size
        self._last = self._file.read(size)
        return self._last

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def check_end(self) -> None:
        """Reads on, which compares checksums.

        Raises:
            ArchiveRefused: it does not end in a block of zeros, or there is more than zeros.
        """
        last, left = self._last, _MOST_OF_HEADERS
        if len(last) < tarfile.BLOCKSIZE:
            raise ArchiveRefused(
                f"{self._where}: cannot be unpacked: the blocks of zeros that are its end are "
                "missing, so it may be cut off. Pack it anew."
            )
        while last:
            if last.strip(b"\0") or left < 0:
                raise ArchiveRefused(
                    f"{self._where}: cannot be unpacked: it goes on after its end, is damaged in "
                    "the middle, or is several in one. Pack it anew."
                )
            last = self._file.read(CHUNK)
            left -= len(last)

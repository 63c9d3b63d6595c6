"""A dataset whose archives are unpacked: each of their files is, to the cache, one object more.

Which files an archive has is kept in the cache once all of them are there, at
``<root>/archives/ab/<digest>.json``. Whoever is killed before has unpacked nothing; who comes after
finds the archive, or the parts of it that had come, and begins to unpack it again. Then the archive
itself goes: what is kept is what is in it.
"""

from __future__ import annotations

import builtins
import hashlib
import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError
from ddl_airflow.storage.archives import SUFFIXES, ArchiveRefused, Member, members, suffix_of
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.fingerprint import Parts, file_sha256
from ddl_airflow.storage.staging import Listing
from ddl_airflow.storage.store import (
    PIECE,
    Advance,
    Fetched,
    ObjectSource,
    StoredObject,
    check_keys,
)
from ddl_airflow.storage.transfer import Meter, Progress, for_each

_log = logging.getLogger(__name__)
_SAY_S = 5.0
_AT_ONCE = 2  # archives that are unpacked; more than that waits for one disk
# What deflate, gzip's and most ZIPs' way, makes at most of a byte is 1,032. Small ones may have
# any ratio.
_MOST_TIMES, _SMALL = 1032, 1 << 30
_MOST_FILES = 10_000_000
_LEFT_FREE = 64 << 20


class _Content(NamedTuple):
    """What is kept of an archive.

    Attributes:
        sha256: of the archive, in hex.
        files: name, size and SHA-256 in hex of each.
    """

    sha256: str
    files: list[tuple[str, int, str]]


class Unpacked:
    """The source of a dataset in which each archive is a folder of its files.

    The folder is named as the archive, without its suffix. Made by ``unpack``.
    """

    def __init__(self, store: ObjectSource, listing: Listing) -> None:
        self._store = store
        self._plain = [obj for obj in listing.objects if not suffix_of(obj.key)]
        self.archives = [obj for obj in listing.objects if suffix_of(obj.key)]
        self._of: dict[str, tuple[StoredObject, str]] = {}
        self._members: list[StoredObject] = []
        self._asked: set[str] = set()
        self._asking: dict[str, threading.Lock] = {}
        #: Of each archive, by its key, the SHA-256 in hex.
        self.sha256: dict[str, str] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """That of the store."""
        return self._store.uri

    @property
    def resumes(self) -> bool:
        """Never: a file that is lost is unpacked from its beginning."""
        return False

    @property
    def caller(self) -> str:
        """That of the store: who may have the archive may have what is in it."""
        return self._store.caller

    def list(self) -> builtins.list[StoredObject]:
        """The files, and the objects that are no archives, sorted by key."""
        return sorted([*self._plain, *self._members], key=lambda obj: obj.key)

    def take(self, archive: StoredObject, content: _Content) -> builtins.list[StoredObject]:
        """Adds the files of an archive, and returns them as objects."""
        folder = archive.key[: -len(suffix_of(archive.key))]
        objects = [
            StoredObject(f"{folder}/{name}", size, sha256, archive.modified)
            for name, size, sha256 in content.files
        ]
        with self._lock:
            self.sha256[archive.key] = content.sha256
            self._asking.setdefault(archive.key, threading.Lock())
            self._members += objects
            for obj, (name, *_) in zip(objects, content.files, strict=True):
                self._of[obj.key] = (archive, name)
        return objects

    def identity(self, obj: StoredObject) -> str:
        """The archive's, and the name in it."""
        if obj.key not in self._of:
            return self._store.identity(obj)
        archive, name = self._of[obj.key]
        return identity_of(self._store, archive, name)

    def check_access(self, obj: StoredObject) -> None:
        """Asks for the archive, once for all that is in it."""
        archive, _ = self._of.get(obj.key, (obj, ""))
        if obj.key not in self._of:
            self._store.check_access(obj)
            return
        with self._asking[archive.key]:
            if archive.key not in self._asked:
                self._store.check_access(archive)
                self._asked.add(archive.key)

    def get(self, obj: StoredObject, path: Path, advance: Advance) -> Fetched:
        """Fetches an object, or the archive again for a file that was lost meanwhile."""
        if obj.key not in self._of:
            return self._store.get(obj, path, advance)
        archive, name = self._of[obj.key]
        packed = path.with_name(f"{path.name}.archive.part")
        try:
            self._store.get(archive, packed, lambda _: advance(0))
            where = f"{self.uri}/{archive.key}"
            for member in members(packed, where, suffix_of(archive.key)):
                if member.name == name:
                    with os_errors(path, obj.size):
                        _, pieces = _written(member, path, advance)
                    return Fetched("sha256", pieces)
        finally:
            packed.unlink(missing_ok=True)
        raise ArchiveRefused(f"{where}: {name!r} is not in it any more")


def identity_of(store: ObjectSource, archive: StoredObject, name: str) -> str:
    """A text equal for two files of archives only if place, content and name are the same."""
    return json.dumps(["file of", store.identity(archive), name])


def unpack(
    store: ObjectSource,
    cache: Cache,
    listing: Listing,
    *,
    workers: int = 8,
    progress: Progress | None = None,
) -> tuple[Unpacked, Listing]:
    """Has the files of all archives in the cache, which somebody keeps ``in_use``.

    Args:
        store: where the data lies.
        cache: where it is kept.
        listing: the objects; its fingerprint remains that of them.
        workers: transfers at once.
        progress: of the archives; see ``Progress``.

    Returns:
        What ``stage`` takes.

    Raises:
        SourceMissing: none of the objects is an archive.
        ArchiveRefused: one may not, or cannot, be unpacked; nothing of it is kept.
        NoSpace: there is no room for what is in one.
        StagingError: as ``stage``.
    """
    source = Unpacked(store, listing)
    if not source.archives:
        raise SourceMissing(
            f"{store.uri}: training_data_reference.unpack: none of the {len(listing.objects):,} "
            f"objects is an archive, {', '.join(SUFFIXES)}. Delete unpack, or correct the source."
        )
    meter = Meter(progress, sum(one.size for one in source.archives), len(source.archives))

    def bring(archive: StoredObject) -> None:
        source.take(archive, _Archive(store, cache, archive, meter).content())
        meter.advance(0, files=1)

    for_each(source.archives, bring, min(_AT_ONCE, workers), meter)
    objects = source.list()
    check_keys((obj.key for obj in objects), store.uri)
    twice = [one.key for one, other in pairwise(objects) if one.key == other.key]
    if twice:
        raise ArchiveRefused(
            f"{store.uri}: {twice[0]!r} is there twice: in two archives, or in one and beside it. "
            "Rename one, or leave it out by training_data_reference.exclude."
        )
    return source, Listing(objects, listing.fingerprint)


def is_unpacked(store: ObjectSource, cache: Cache, archive: StoredObject) -> bool:
    """Whether all that is in an archive is in the cache."""
    return _Archive(store, cache, archive, Meter(None, archive.size, 1)).is_there()


class _Archive:
    """One archive, and what is kept of it."""

    def __init__(
        self, store: ObjectSource, cache: Cache, archive: StoredObject, meter: Meter
    ) -> None:
        self._store, self._cache, self._archive, self._meter = store, cache, archive, meter
        self._where = f"{store.uri}/{archive.key}"
        digest = hashlib.sha256(identity_of(store, archive, "").encode()).hexdigest()
        self._folder = cache.root / "archives"
        self._index = self._folder / digest[:2] / f"{digest}.json"
        self._scratch = self._folder / "unpacking"

    def is_there(self) -> bool:
        """Whether all that is in it is in the cache."""
        return self._held() is not None

    def content(self) -> _Content:
        """What is in it; all of it is in the cache then."""
        if not self._archive.key[: -len(suffix_of(self._archive.key))].rpartition("/")[2]:
            raise ArchiveRefused(f"{self._where}: cannot be unpacked: it has no name. Rename it.")
        if (content := self._held()) is not None:
            self._meter.advance(self._archive.size)
            return content  # ``stage`` sees that the caller may have it
        # Of its own: what else the cache has of this archive, some run may link to.
        packed = Cache(self._folder)
        with packed.alone_with(self._index, self._meter.advance) as locked:
            if (content := self._held()) is not None:  # by who was before
                self._meter.advance(self._archive.size)
                return content
            with os_errors(self._index):
                self._index.unlink(missing_ok=True)
                for left in self._scratch.glob(f"{self._index.stem}-*") if locked else ():
                    left.unlink()  # by who was killed
            if self._cache.holds(self._store, self._archive):
                self._cache.check_access(self._store, self._archive)
                if self._cache.drop_if_damaged(self._store, self._archive):
                    self._cache.fetch(self._store, self._archive, self._meter.advance)
                else:
                    self._meter.advance(self._archive.size)
                content = self._unpacked(self._cache.path(self._store, self._archive))
            else:
                packed.fetch(self._store, self._archive, self._meter.advance)
                blob = packed.path(self._store, self._archive)
                try:
                    content = self._unpacked(blob)
                except StagingError as error:
                    if isinstance(error, NoSpace) or not error.retryable:
                        packed.evict(blob)  # of no use to the next try, or in its way
                    raise
                packed.evict(blob)
        return content

    def _held(self) -> _Content | None:
        """What is in it, if all of that is in the cache."""
        try:
            kept = json.loads(self._index.read_bytes())
            content = _Content(kept["sha256"], [(n, s, d) for n, s, d in kept["files"]])
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None
        source = Unpacked(self._store, Listing([], ""))
        objects = source.take(self._archive, content)
        return content if all(self._cache.holds(source, obj) for obj in objects) else None

    def _unpacked(self, path: Path) -> _Content:
        files: list[tuple[str, int, str]] = []
        source, blob = Unpacked(self._store, Listing([], "")), Path()
        nbytes, said = 0, time.monotonic()
        part = self._scratch / f"{self._index.stem}-{uuid.uuid4().hex}"
        with os_errors(part):
            self._scratch.mkdir(parents=True, exist_ok=True)
        try:
            for member in members(path, self._where, suffix_of(self._archive.key)):
                nbytes += member.size
                self._check_room(member, nbytes, len(files))
                with os_errors(part, member.size):
                    sha256, pieces = _written(member, part, lambda _: self._meter.advance(0))
                    files.append((member.name, member.size, sha256))
                    (obj,) = source.take(self._archive, _Content("", files[-1:]))
                    self._cache.add(source, obj, part, pieces)
                    blob = self._cache.path(source, obj)
                if time.monotonic() - said > _SAY_S:
                    said = time.monotonic()
                    _log.info("%s: unpacked %d files, %.1f MiB so far", *self._so_far(files))
        finally:
            part.unlink(missing_ok=True)
        if not files:
            raise ArchiveRefused(f"{self._where}: there is no file in it. Delete or exclude it.")
        check_keys((obj.key for obj in source.list()), self._store.uri)
        content = _Content(file_sha256(path)[0], files)
        # All at once: for each of maybe a million small files it would take longer than they.
        self._cache.flush()
        with os_errors(self._index):
            self._index.parent.mkdir(parents=True, exist_ok=True)
            new = self._index.with_name(f"{self._index.name}.{uuid.uuid4().hex}")
            # ``cleaning`` takes this away when it has taken that.
            new.write_text(json.dumps(content._asdict() | {"blob": blob.name}))
            os.replace(new, self._index)
        _log.info("%s: unpacked %d files, %.1f MiB", *self._so_far(files))
        return content

    def _so_far(self, files: Sequence[tuple[str, int, str]]) -> tuple[str, int, float]:
        return self._where, len(files), sum(size for _, size, _ in files) / 2**20

    def _check_room(self, member: Member, nbytes: int, count: int) -> None:
        """Raises if the archive is one that is made to fill disks."""
        named = f"{self._where}: cannot be unpacked: {member.name[:200]!r}"
        if count >= _MOST_FILES:
            raise ArchiveRefused(f"{named} is one file more than {_MOST_FILES:,}. Pack several.")
        if nbytes > max(_SMALL, _MOST_TIMES * self._archive.size):
            raise ArchiveRefused(
                f"{named}: with it, {nbytes:,} bytes come out of {self._archive.size:,}, more than "
                f"{_MOST_TIMES:,} times as many. Pack it anew, or as several."
            )
        with os_errors(self._folder):
            found = os.statvfs(self._folder)
        free = found.f_bavail * found.f_frsize - _LEFT_FREE
        if member.size > free or (found.f_files and found.f_favail < 3):
            raise NoSpace(
                f"{named}, after {count:,} files, is {member.size:,} bytes; {max(0, free):,} "
                f"bytes and {found.f_favail:,} names are free in {self._cache.root}. Free space "
                "there, run `ddl-airflow clean`, or set the workspace to a larger disk."
            )


def _written(member: Member, path: Path, advance: Advance) -> tuple[str, list[str]]:
    """Writes a file of an archive.

    Returns:
        Its SHA-256 in hex, and those of its pieces.
    """
    whole, pieces = hashlib.sha256(), Parts(PIECE, hashlib.sha256)
    with open(path, "wb") as writer:
        for chunk in member.chunks:
            writer.write(chunk)
            whole.update(chunk)
            pieces.update(chunk)
            advance(len(chunk))
    return whole.hexdigest(), [digest.hex() for digest in pieces.digests()]

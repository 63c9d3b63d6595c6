"""What a training has left so far, in a store while it runs, for a worker that is lost.

Below a place of the training's own::

    chunks/<SHA-256>   at most ``CHUNK_BYTES`` of a file
    00000001.json      a snapshot: files, and the chunks that each consists of
    try.json           the newest try that saves here

A chunk that is there is not sent again, so a snapshot costs what has changed. It comes last,
by a conditional write, when all its chunks are there: what a killed process leaves has none. Only
checkpoints that nobody changed meanwhile are in one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.errors import (
    AccessDenied,
    FileRefused,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.storage.filesystem import os_errors, paths_below, why_private
from ddl_airflow.storage.marker import is_as_sealed, sealed
from ddl_airflow.storage.store import PART_PREFIX, ObjectStore, check_keys

SNAPSHOTS = "_checkpoints"  # below <results>/<training id>
CHUNK_BYTES = 8 * 2**20
KEEP = 2  # snapshots
_CHUNKS, _OWNER = "chunks", "try.json"
_NAME = re.compile(r"([0-9]{8})\.json")
_TAKES = 3  # until the checkpoints have not changed while they were read
_READS = 3  # of a chunk
_BEGINNINGS = 3  # of a snapshot, where another one got the name
# Files of checkpoints: of TensorFlow's, ``checkpoint`` is the last that is written.
_CHECKPOINT = re.compile(
    r"(?:.*/)?(?:checkpoint|.*\.(?:index|meta|keras|h5|hdf5|npz|ckpt)|.*\.data-\d+-of-\d+)"
)
_IN_CHECKPOINTS = "checkpoints/"  # CHECKPOINT_DIR, whatever is in it
_EVENTS = "events.out.tfevents"  # which grow
# Half-written, by TensorFlow and by ours; and what no object can be called.
_LEFT_OUT = re.compile(
    r"(?:.*/)?(?:\..*|.*\.tempstate\d*|.*_temp/.*)|.*[\0-\x1f\x7f\ud800-\udfff].*"
)


class TryIsOver(StagingError):
    """A later try of the training saves here now."""


class Saved(NamedTuple):
    """What ``save`` has done: the snapshot's uri, its files and bytes, and what of it was sent."""

    uri: str
    files: int
    nbytes: int
    sent: int
    sent_nbytes: int


class Restored(NamedTuple):
    """What ``restore`` has brought: the snapshot, its files and bytes, when it was made, in seconds
    since 1970, and by which try.
    """

    uri: str
    files: int
    nbytes: int
    made: float
    by_try: int


@dataclass(frozen=True)
class _Found:
    """A file as it is: what changes whenever its content does."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class Snapshots:
    """Those of one training.

    Args:
        store: the place of its own.
        folder: RESULT_DIR, in which ranks write.
        root: above that, as ``open_beneath`` has it.
        facts: what a snapshot must have been made of to go on from: names -> texts.
        try_number: of the training, later ones have higher ones.
        go_on: asked between chunks; False ends what is being done.
        now: seconds since 1970.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        root: Path,
        facts: Mapping[str, str],
        try_number: int,
        *,
        now: Callable[[], float],
        go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._store, self._chunks = store, store.at(_CHUNKS)
        self._folder, self._root, self._facts = folder, root, dict(facts)
        self._try, self._now, self._go_on = try_number, now, go_on
        self._read: dict[str, tuple[_Found, list[list[Any]]]] = {}
        self._last: list[Any] = []

    def begin(self) -> None:
        """Keeps earlier tries that may still run somewhere from saving.

        Raises:
            TryIsOver: a later one has begun.
        """
        for _ in range(_BEGINNINGS):
            version = self._check_owner()
            if self._store.put_if(
                _OWNER, json.dumps({"try": self._try, "token": uuid.uuid4().hex}).encode(), version
            ):
                return
        self._check_owner()

    def save(self) -> Saved | None:
        """Sends what has changed since the last snapshot, and makes one.

        Returns:
            None: there is no checkpoint, nothing has changed, or it changed whenever it was read.

        Raises:
            TryIsOver: a later try saves here.
            StagingError: the store takes nothing, or nobody wants it any more.
        """
        self._check_owner()
        names, there = self._listed()
        before = len(there)
        sent_nbytes = 0

        def send(digest: str, body: bytes) -> None:
            nonlocal sent_nbytes
            if digest not in there:
                self._chunks.put_bytes(digest, body)
                there.add(digest)
                sent_nbytes += len(body)

        files = self._taken(there, send)
        if files is None or (files == self._last and names):
            return None
        number = max((int(name[:8]) for name in names), default=0) + 1
        name = self._noted(number, files)
        self._last = files
        self._drop_others({*names, name}, there)
        nbytes = sum(file["size"] for file in files)
        return Saved(
            f"{self._store.uri}/{name}", len(files), nbytes, len(there) - before, sent_nbytes
        )

    def restore(self, newer_than: float = 0.0) -> Restored | None:
        """Puts the newest snapshot that is whole in the place of the folder.

        Args:
            newer_than: seconds since 1970; None is brought whose newest checkpoint is not newer.

        Returns:
            None: there is none.

        Raises:
            StagingError: what there is cannot be fetched, or is damaged.
        """
        names, _ = self._listed()
        failed: StagingError | None = None
        for name in sorted(names, reverse=True):
            try:
                snapshot = self._snapshot(name)
                if snapshot is None:
                    continue
                if snapshot["facts"] != self._facts:
                    return None
                if newest_of(snapshot["files"]) <= newer_than:
                    return None
                self._brought(snapshot["files"])
            except (SourceMissing, TransferCorrupt) as error:
                failed = error  # the one before may be whole
            else:
                self._last = files = snapshot["files"]
                nbytes = sum(file["size"] for file in files)
                uri = f"{self._store.uri}/{name}"
                return Restored(uri, len(files), nbytes, snapshot["made"], snapshot["try"])
        if failed is not None:
            raise failed
        return None

    def drop(self) -> None:
        """Removes all snapshots of the training, and then their chunks."""
        drop(self._store)

    # What there is.

    def _listed(self) -> tuple[set[str], set[str]]:
        """Names of snapshots, and of chunks."""
        try:
            keys = [obj.key for obj in self._store.list()]
        except SourceMissing:  # a folder, which the first chunk makes
            return set(), set()
        names = {key for key in keys if _NAME.fullmatch(key)}
        return names, {key[len(_CHUNKS) + 1 :] for key in keys if key.startswith(f"{_CHUNKS}/")}

    def _check_owner(self) -> str | None:
        """The version of what says which try saves here; None: nothing does."""
        if (read := self._store.read_version(_OWNER)) is None:
            return None
        with suppress(ValueError, LookupError, TypeError):
            if (newest := int(json.loads(read[0])["try"])) > self._try:
                raise TryIsOver(
                    f"{self._store.uri}: try {newest} of the training saves its checkpoints there, "
                    f"and this is try {self._try}",
                    retryable=False,
                )
        return read[1]

    def _snapshot(self, name: str) -> dict[str, Any] | None:
        """What it says; None: it is gone."""
        if (read := self._store.read_version(name)) is None:
            return None
        try:
            if not is_as_sealed(read[0]):
                raise ValueError("its digest is another")
            said: dict[str, Any] = json.loads(read[0])
            check_keys([file["key"] for file in said["files"]], self._store.uri)
            for file in said["files"]:
                lengths = [int(chunk[1]) for chunk in file["chunks"]]
                if sum(lengths) != file["size"]:
                    raise ValueError(f"{file['key']} has chunks of other sizes")
        except (ValueError, LookupError, TypeError) as error:
            raise TransferCorrupt(f"{self._store.uri}/{name} is no snapshot: {error}") from error
        return said

    # Up.

    def _taken(
        self, there: set[str], send: Callable[[str, bytes], None]
    ) -> list[dict[str, Any]] | None:
        """The files, their chunks sent; None: there is no checkpoint, or it does not hold still."""
        for _ in range(_TAKES):
            before = found_in(self._folder, self._root)
            if not any(map(is_checkpoint, before)):
                return None
            chunks = {key: self._sent(key, found, there, send) for key, found in before.items()}
            after = found_in(self._folder, self._root)
            changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
            changed |= {key for key, made in chunks.items() if made is None}
            if any(map(is_checkpoint, changed)):
                continue
            return [
                {"key": key, "size": found.size, "mtime_ns": found.mtime_ns, "chunks": made}
                for key, found in sorted(before.items())
                # Of one that only grows, what was there is whole.
                if (made := chunks[key]) is not None and _is_same_or_grew(found, after.get(key))
            ]
        return None

    def _sent(
        self, key: str, found: _Found, there: set[str], send: Callable[[str, bytes], None]
    ) -> list[list[Any]] | None:
        """Digest and bytes of each chunk; None: the file is another one by now."""
        known = self._read.get(key)
        if known and known[0] == found and there.issuperset(digest for digest, _ in known[1]):
            return known[1]
        chunks: list[list[Any]] = []
        path = self._folder / key
        try:
            descriptor = open_beneath(path, self._root)
        except PermissionError:
            raise AccessDenied(f"{path}: {why_private(path)}.") from None
        except (FileRefused, OSError):
            return None
        with open(descriptor, "rb") as file, os_errors(path):
            left = found.size
            while left:
                if not self._go_on():
                    raise StagingError("nobody wants the checkpoints in the store any more")
                body = file.read(min(CHUNK_BYTES, left))
                if not body:
                    return None
                left -= len(body)
                digest = hashlib.sha256(body).hexdigest()
                send(digest, body)
                chunks.append([digest, len(body)])
        self._read[key] = found, chunks
        return chunks

    def _noted(self, number: int, files: list[dict[str, Any]]) -> str:
        """Makes the snapshot. Returns its name."""
        said = {
            "made": self._now(),
            "try": self._try,
            "token": uuid.uuid4().hex,
            "facts": self._facts,
            "files": files,
        }
        body = sealed(said)
        for _ in range(_BEGINNINGS):
            name = f"{number:08}.json"
            if self._store.put_if(name, body, None):
                return name
            # It may have been this very call, whose answer was lost.
            if (read := self._store.read_version(name)) is not None and read[0] == body:
                return name
            self._check_owner()
            number += 1
        raise StagingError(
            f"{self._store.uri}/{number:08}.json: others save there, too. See which other task "
            "trains the same."
        )

    def _drop_others(self, names: set[str], there: set[str]) -> None:
        """Leaves the newest snapshots, and what they consist of."""
        kept = sorted(names)[-KEEP:]
        needed = set()
        for name in kept:
            with suppress(TransferCorrupt):
                if snapshot := self._snapshot(name):
                    needed |= {chunk[0] for file in snapshot["files"] for chunk in file["chunks"]}
        self._check_owner()
        self._store.delete(sorted(names - {*kept}))
        self._chunks.delete(sorted(there - needed))

    # Down.

    def _brought(self, files: list[dict[str, Any]]) -> None:
        fresh = self._folder.with_name(PART_PREFIX + uuid.uuid4().hex)
        try:
            with os_errors(fresh, sum(file["size"] for file in files)):
                fresh.mkdir(parents=True)
                for file in files:
                    path = fresh / file["key"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with open(path, "wb") as writer:
                        for digest, nbytes in file["chunks"]:
                            writer.write(self._chunk(digest, nbytes))
                        writer.flush()
                        os.fsync(writer.fileno())
                    os.utime(path, ns=(file["mtime_ns"], file["mtime_ns"]))
                before = fresh.with_name(PART_PREFIX + uuid.uuid4().hex)
                if self._folder.exists():
                    fresh.chmod(stat.S_IMODE(self._folder.stat().st_mode))
                    self._folder.rename(before)
                fresh.rename(self._folder)
                shutil.rmtree(before, ignore_errors=True)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _chunk(self, digest: str, nbytes: int) -> bytes:
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise TransferCorrupt(f"{self._store.uri}: {digest!r} names no chunk")
        failed: StagingError | None = None
        for _ in range(_READS):
            if not self._go_on():
                raise StagingError("nobody wants the checkpoints any more")
            try:
                body = self._chunks.read_bytes(digest)
            except StagingError as error:
                if not error.retryable:
                    raise
                failed = error
                continue
            if len(body) == nbytes and hashlib.sha256(body).hexdigest() == digest:
                return body
            failed = TransferCorrupt(
                f"{self._chunks.uri}/{digest}: its SHA-256 is another, of {len(body):,} bytes"
            )
        assert failed is not None
        raise failed


def is_checkpoint(key: str) -> bool:
    """Whether a file below RESULT_DIR may be one of a checkpoint's."""
    if key.rpartition("/")[2].startswith(_EVENTS):
        return False
    return key.startswith(_IN_CHECKPOINTS) or _CHECKPOINT.fullmatch(key) is not None


def found_in(folder: Path, root: Path) -> dict[str, _Found]:
    """The files in a folder in which ranks write, by their keys.

    Links, and what is not the folder's own, are left out, as they are when results are published;
    and what may not be read, but for folders and what is called as checkpoints are.
    """
    found = {}
    for path in paths_below(folder) if folder.is_dir() else ():
        key = path.relative_to(folder).as_posix()
        if _LEFT_OUT.fullmatch(key):
            continue
        try:
            now = _looked_at(path, root, key)
        except (FileRefused, OSError):
            continue
        found[key] = _Found(now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino)
    return found


def _looked_at(path: Path, root: Path, key: str) -> os.stat_result:
    """Raises as ``open_beneath``."""
    try:
        descriptor = open_beneath(path, root)
    except PermissionError:
        now = os.lstat(path)
        if stat.S_ISDIR(now.st_mode) or _CHECKPOINT.fullmatch(key):
            return now
        raise
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def newest_in(folder: Path, root: Path) -> float:
    """When the newest file of a checkpoint in a folder was written, in seconds since 1970; 0: there
    is none.
    """
    found = found_in(folder, root).items()
    return max((one.mtime_ns / 1e9 for key, one in found if is_checkpoint(key)), default=0.0)


def newest_of(files: list[dict[str, Any]]) -> float:
    """The same, of the files of a snapshot."""
    times = (file["mtime_ns"] / 1e9 for file in files if is_checkpoint(file["key"]))
    return max(times, default=0.0)


def drop(store: ObjectStore) -> None:
    """Removes what is below the place of a training's snapshots, these first.

    Raises:
        StagingError: as ``ObjectStore`` does.
    """
    with suppress(SourceMissing):
        store.delete(_in_order(obj.key for obj in store.list()))


def _in_order(keys: Iterator[str]) -> list[str]:
    return sorted(keys, key=lambda key: (_NAME.fullmatch(key) is None, key))


def _is_same_or_grew(before: _Found, after: _Found | None) -> bool:
    return after is not None and (
        before == after or (before.inode == after.inode and before.size <= after.size)
    )

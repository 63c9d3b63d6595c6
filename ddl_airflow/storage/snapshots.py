"""What a training has left so far, in a store while it runs, for a worker that is lost.

Below a place of the training's own::

    chunks/<SHA-256>   at most ``CHUNK_BYTES`` of a file
    00000001.json      a snapshot: files, and the chunks that each consists of
    try.json           the newest try that saves here

A chunk that is there is not sent again, so a snapshot costs what has changed. It comes last,
by a conditional write, when all its chunks are there: what a killed process leaves has none, and
the next save removes. A snapshot has the checkpoints of one moment, where at most ``_MOST_OPEN``
of their files are new: these are held open, and those that are written in place copied, before
they are sent.

Whether a checkpoint is whole, who tries again finds out. So beside the newest snapshots stay the
one that the try has gone on from, and the newest that has nothing that looks half-written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.errors import (
    DAMAGED,
    AccessDenied,
    FileRefused,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.core.removal import remove_tree
from ddl_airflow.storage.checkpoint_files import (
    Found,
    are_there,
    damaged_in,
    found_in,
    is_as_found,
    is_checkpoint,
    is_further,
    is_half,
    is_read_again,
    newest_by_name,
    newest_read_again,
)
from ddl_airflow.storage.filesystem import os_errors, why_private
from ddl_airflow.storage.marker import is_as_sealed, sealed
from ddl_airflow.storage.store import PART_PREFIX, ObjectStore, check_keys

SNAPSHOTS = "_checkpoints"  # below <results>/<training id>
CHUNK_BYTES = 8 * 2**20
KEEP = 2  # snapshots, whatever is in them
_CHUNKS, _OWNER = "chunks", "try.json"
_NAME = re.compile(r"([0-9]{8})\.json")
# What is written on conditions has an object beside it that tells whether the store heeds them.
_OWN = re.compile(rf"(?:{_OWNER}|{_NAME.pattern})(?:\.conditions)?|{_CHUNKS}/[0-9a-f]{{64}}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TAKES = 5  # until the checkpoints hold still
_PAUSE_S = 0.5  # between these
_MOST_OPEN = 200  # files at once
_READS = 3  # of a chunk
_BEGINNINGS = 3  # of a snapshot, where another one got the name


class TryIsOver(StagingError):
    """A later try of the training saves here now."""


class CheckpointsChange(StagingError):
    """A checkpoint was written whenever it was read."""


class Saved(NamedTuple):
    """What ``save`` has done: the snapshot's uri, its files and bytes, what of it was sent, and
    which of its files look half-written.
    """

    uri: str
    files: int
    nbytes: int
    sent: int
    sent_nbytes: int
    half_written: tuple[str, ...]


class Restored(NamedTuple):
    """What ``restore`` has brought: the snapshot, its files and bytes, when it was made, in seconds
    since 1970, by which try, whether it has one that was damaged here, and where newer checkpoints
    are now that were here.
    """

    uri: str
    files: int
    nbytes: int
    made: float
    by_try: int
    was_damaged: bool
    kept: Path | None


class _Opened(NamedTuple):
    """A file that is to be sent, whatever becomes of its name."""

    file: IO[bytes]
    is_copy: bool


class _Read(NamedTuple):
    """A file that was sent, the digest and the bytes of each chunk, and whether it looked
    half-written.
    """

    found: Found
    chunks: list[list[Any]]
    is_half: bool


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
        begun_with: what else a snapshot says of those who made it, which is not compared.

    Attributes:
        brought: what ``begun_with`` said of the snapshot that ``restore`` has put in place;
            empty: none was, or it was an earlier version's.
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
        begun_with: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.brought: Mapping[str, Any] = {}
        self._begun_with = begun_with
        self._store, self._chunks = store, store.at(_CHUNKS)
        self._folder, self._root, self._facts = folder, root, dict(facts)
        self._try, self._now, self._go_on = try_number, now, go_on
        self._read: dict[str, _Read] = {}
        self._in_place: set[str] = set()  # keys of what changed while it was sent
        self._last: list[Any] = []
        self._base: str | None = None  # the snapshot that the try has gone on from
        self._begun: set[str] = set()  # chunks of the longest save that was interrupted
        self._unread: set[str] = set()  # snapshots that were damaged when they were read last

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
            None: there is no checkpoint, or nothing has changed.

        Raises:
            TryIsOver: a later try saves here.
            CheckpointsChange: nothing could be saved, for it never held still.
            StagingError: the store takes nothing, or nobody wants it any more.
        """
        self._check_owner()
        names, there = self._listed()
        before = len(there)
        sent_nbytes = 0
        begun: set[str] = set()

        def send(digest: str, body: bytes) -> None:
            nonlocal sent_nbytes
            begun.add(digest)
            if digest not in there:
                self._chunks.put_bytes(digest, body)
                there.add(digest)
                sent_nbytes += len(body)

        try:
            files = self._taken(there, send)
            if files is None or (files == self._last and names):
                return None
            self._begun = begun = set()  # all of it was sent
            number = max((int(name[:8]) for name in names), default=0) + 1
            half = tuple(file["key"] for file in files if self._read[file["key"]].is_half)
            name = self._noted(number, files, bool(half))
        except StagingError as error:
            if sent_nbytes and self._go_on():
                # What is here now may be in the next one. The rest would pile up.
                known = {chunk[0] for read in self._read.values() for chunk in read.chunks}
                if not isinstance(error, CheckpointsChange):  # the next one gets further
                    self._begun = max(self._begun, begun, key=len)
                    known |= begun | self._begun
                with suppress(StagingError):
                    self._drop_others(names, there - known)
            raise
        self._last = files
        self._drop_others({*names, name}, there)
        nbytes = sum(file["size"] for file in files)
        uri, sent = f"{self._store.uri}/{name}", len(there) - before
        return Saved(uri, len(files), nbytes, sent, sent_nbytes, half)

    def restore(
        self, leave_whole: Callable[[Path], None] = lambda _: None, aside: Path | None = None
    ) -> Restored | None:
        """Puts the newest snapshot that is whole in the place of the folder, if it is newer.

        Where a checkpoint was damaged, here or in a snapshot, an older one is brought that has it
        whole, unless a checkpoint of a step is here that is newer.

        Args:
            leave_whole: moves damaged checkpoints out of a folder: called with one that has a
                snapshot's files, before it takes the place.
            aside: where to, now and before. Newer checkpoints that were here are kept there, too.

        Returns:
            None: there is none.

        Raises:
            StagingError: what there is cannot be fetched, or is damaged.
        """
        names, _ = self._listed()
        failed: StagingError | None = None
        restored: Restored | None = None
        found = found_in(self._folder, self._root)
        here = newest_by_name((key, one.mtime_ns) for key, one in found.items())
        gone = damaged_in(aside) - here.keys()
        same = after = None
        for name in sorted(names, reverse=True):
            try:
                snapshot = self._snapshot(name)
                if snapshot is None:
                    continue
                if snapshot["facts"] != self._facts:
                    failed = None
                    break
                files = snapshot["files"]
                if same is None and restored is None and are_there(files, found):
                    same = name  # what is here was read
                after = after or snapshot.get("after")
                there = newest_by_name((file["key"], file["mtime_ns"]) for file in files)
                if not is_further(there, here, damaged_in(aside)):
                    continue
                with self._fetched(files) as fresh:
                    leave_whole(fresh)
                    left = found_in(fresh, self._root)
                    there = newest_by_name((key, one.mtime_ns) for key, one in left.items())
                    if is_further(there, here, damaged_in(aside)):
                        newer = newest_read_again(here) > max(there.values())
                        keep = aside if newer and restored is None else None
                        kept = keep and keep / f"result-{self._try}"
                        self._put_in_place(fresh, kept)
                        here, same, self._last = there, name, files
                        self._base = name  # also where the one before cannot be fetched
                        self.brought = snapshot.get("begun_with", {})
                        nbytes = sum(file["size"] for file in files)
                        uri = f"{self._store.uri}/{name}"
                        made, number = snapshot["made"], snapshot["try"]
                        restored = Restored(
                            *(uri, len(files), nbytes, made, number, not gone.isdisjoint(there)),
                            restored.kept if restored else kept,
                        )
            except (SourceMissing, TransferCorrupt) as error:
                failed = error  # the one before may be whole
            else:
                if all(file["key"] in left for file in files if is_read_again(file["key"])):
                    break
        self._base = same or after
        if failed is not None and restored is None:
            raise failed
        return restored

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
        except DAMAGED as error:
            raise TransferCorrupt(f"{self._store.uri}/{name} is no snapshot: {error}") from error
        return said

    # Up.

    def _taken(
        self, there: set[str], send: Callable[[str, bytes], None]
    ) -> list[dict[str, Any]] | None:
        """The files, their chunks sent; None: there is no checkpoint."""
        for take in range(_TAKES):
            if take:
                time.sleep(_PAUSE_S)
                self._check_wanted()
            before = found_in(self._folder, self._root)
            if not any(map(is_checkpoint, before)):
                return None
            self._read = {key: read for key, read in self._read.items() if key in before}
            self._in_place &= before.keys()
            with ExitStack() as held:
                opened = self._opened(before, there, held)
                after = found_in(self._folder, self._root)
                unlike = {key for key in {*before, *after} if before.get(key) != after.get(key)}
                unlike |= {key for key, one in opened.items() if one is None}
                if changed := sorted(filter(is_checkpoint, unlike)):
                    continue
                with os_errors(self._folder):
                    half = any(one and is_half(key, one.file) for key, one in opened.items())
                if half and take < _TAKES - 1:  # it may soon be whole
                    continue
                chunks = {
                    key: self._sent(key, found, opened.get(key), there, send)
                    for key, found in before.items()
                }
            changed = sorted(key for key in chunks if chunks[key] is None and is_checkpoint(key))
            if changed:
                self._in_place.update(changed)
                continue
            return [
                {"key": key, "size": found.size, "mtime_ns": found.mtime_ns, "chunks": made}
                for key, found in sorted(before.items())
                if (made := chunks[key]) is not None
            ]
        path = self._folder / changed[0]
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CheckpointsChange(
            f"{path}{more}: it changed each of the {_TAKES} times that it was read. Let the script "
            "save less often, or under another name that it renames when the file is whole, as "
            "ddl.keras.CheckpointCallback does."
        )

    def _opened(
        self, found: Mapping[str, Found], there: set[str], held: ExitStack
    ) -> dict[str, _Opened | None]:
        """What of checkpoints is to be sent, as it is now; None: it is another file by now."""
        keys = [key for key, one in found.items() if is_checkpoint(key)]
        keys = [key for key in keys if self._known(key, found[key], there) is None]
        keys.sort(key=lambda key: key not in self._in_place)
        opened: dict[str, _Opened | None] = {}
        for key in keys[:_MOST_OPEN]:
            if (file := self._open(key)) is None:
                opened[key] = None
                continue
            held.enter_context(file)
            opened[key] = _Opened(file, is_copy=False)
            if key in self._in_place:
                opened[key] = self._copied(key, found[key], file, held) or opened[key]
        return opened

    def _copied(self, key: str, found: Found, file: IO[bytes], held: ExitStack) -> _Opened | None:
        """A copy, which is gone with this process; None: it would fill the disk, and ranks write
        there, or a quota; or the file is gone.
        """
        folder = self._folder.parent
        with os_errors(folder, found.size), ExitStack() as copied:
            if shutil.disk_usage(folder).free < 2 * found.size:
                return None
            try:
                # Unbuffered: what is not written yet would fail once more when it is closed.
                copy = copied.enter_context(tempfile.TemporaryFile(buffering=0, dir=folder))
                while body := file.read(CHUNK_BYTES):
                    self._check_wanted()
                    left = memoryview(body)
                    while left:
                        left = left[copy.write(left) :]
                copy.seek(0)
            except OSError as error:
                if error.errno not in (*_FULL, errno.ESTALE):
                    raise
                file.seek(0)
                return None
            held.push(copied.pop_all())
        return _Opened(copy, is_copy=True)

    def _open(self, key: str) -> IO[bytes] | None:
        path = self._folder / key
        try:
            return open(open_beneath(path, self._root), "rb")
        except PermissionError:
            raise AccessDenied(f"{path}: {why_private(path)}.") from None
        except (FileRefused, OSError):
            return None

    def _known(self, key: str, found: Found, there: set[str]) -> list[list[Any]] | None:
        """Digest and bytes of each chunk, where all of them are in the store."""
        read = self._read.get(key)
        if read and read.found == found and there.issuperset(digest for digest, _ in read.chunks):
            return read.chunks
        return None

    def _sent(
        self,
        key: str,
        found: Found,
        opened: _Opened | None,
        there: set[str],
        send: Callable[[str, bytes], None],
    ) -> list[list[Any]] | None:
        """Digest and bytes of each chunk; None: the file has changed by now."""
        if (known := self._known(key, found, there)) is not None:
            return known
        file = opened.file if opened else self._open(key)
        if file is None:
            return None
        chunks: list[list[Any]] = []
        with file, os_errors(self._folder / key):
            half, left = is_half(key, file), found.size
            while left:
                self._check_wanted()
                is_copy = opened is not None and opened.is_copy
                try:
                    body = file.read(min(CHUNK_BYTES, left))
                    alike = is_copy or is_as_found(key, found, os.fstat(file.fileno()))
                except OSError as error:
                    if error.errno != errno.ESTALE:
                        raise
                    return None  # another host has removed it
                if not (alike and body):
                    return None
                left -= len(body)
                digest = hashlib.sha256(body).hexdigest()
                send(digest, body)
                chunks.append([digest, len(body)])
        self._read[key] = _Read(found, chunks, half)
        return chunks

    def _check_wanted(self) -> None:
        if not self._go_on():
            raise StagingError("nobody wants the checkpoints in the store any more")

    def _noted(self, number: int, files: list[dict[str, Any]], half: bool) -> str:
        """Makes the snapshot. Returns its name."""
        said = {
            "made": self._now(),
            "try": self._try,
            "token": uuid.uuid4().hex,
            "facts": self._facts,
            "begun_with": dict(self._begun_with()),
            "files": files,
            "after": self._base,
            "half_written": half,
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
        """Leaves those to go on from, and what they consist of."""
        read = {}
        for name in sorted(names, reverse=True):
            with suppress(TransferCorrupt):
                if (snapshot := self._snapshot(name)) is None:
                    names = names - {name}  # it is gone
                else:
                    read[name] = snapshot
        before, self._unread = self._unread, names - read.keys()
        if self._unread - before:  # it may be whole the next time, and need its chunks
            return
        if self._base is None:  # an earlier try's, where this one could not read what there is
            self._base = next((one["after"] for one in read.values() if one.get("after")), None)
        whole = next((name for name, one in read.items() if not one.get("half_written")), None)
        kept = set(sorted(names)[-KEEP:]) | (names & {self._base, whole})
        needed = {
            chunk[0]
            for name in kept & read.keys()
            for file in read[name]["files"]
            for chunk in file["chunks"]
        }
        self._check_owner()
        self._store.delete(sorted(names - kept))
        self._chunks.delete(sorted(there - needed))

    # Down.

    @contextmanager
    def _fetched(self, files: list[dict[str, Any]]) -> Iterator[Path]:
        """A folder with the files, beside the one in which ranks write; then it goes."""
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
            yield fresh
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _put_in_place(self, fresh: Path, kept: Path | None) -> None:
        """What was there is kept, if it is said where."""
        with os_errors(fresh):
            before = kept or fresh.with_name(PART_PREFIX + uuid.uuid4().hex)
            if self._folder.exists():
                fresh.chmod(stat.S_IMODE(self._folder.stat().st_mode))
                self._folder.rename(before)
            fresh.rename(self._folder)
            if kept is None:
                with suppress(OSError):
                    remove_tree(before)

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


def why_not_ours(keys: Iterable[str]) -> str:
    """Why what is in a place, by all its keys, is nothing that ``Snapshots`` left; else empty."""
    keys = set(keys)
    if others := sorted(key for key in keys if not _OWN.fullmatch(key)):
        return f"{others[0]} is not ours"
    return "" if _OWNER in keys else f"it has no {_OWNER}"


def drop(store: ObjectStore, keys: Iterable[str] | None = None) -> None:
    """Removes what is below the place of a training's snapshots, these first.

    Args:
        store: the place.
        keys: of what is to go; None: of all that is listed there.

    Raises:
        StagingError: as ``ObjectStore`` does.
    """
    with suppress(SourceMissing):
        keys = (obj.key for obj in store.list()) if keys is None else keys
        store.delete(_in_order(keys))


def _in_order(keys: Iterable[str]) -> list[str]:
    # What says whose they are comes last: who is killed meanwhile leaves what can be told from
    # others'.
    return sorted(keys, key=lambda key: (_NAME.fullmatch(key) is None, key == _OWNER, key))

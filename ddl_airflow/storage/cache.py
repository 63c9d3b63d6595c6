"""Objects kept on disk by what they are, so that unchanged data is fetched once.

The cache gives an object to nobody whom the store would not give it to: who has not fetched it with
the same keys, or asked before, asks the store. What is there is what was fetched: its digests are
kept beside it, and compared with samples of it whenever it is used, with all of it on demand.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, NamedTuple

from ddl_airflow.core.errors import NoSpace, StagingError, TransferCorrupt
from ddl_airflow.storage.download import journal_of
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.store import CHUNK, PIECE, Advance, ObjectSource, StoredObject

CACHED = "cache"  # how an object was checked that this call did not fetch
_SAMPLE = 4 * PIECE  # bytes compared whenever a dataset is staged from the cache
_RANDOM = random.SystemRandom()  # not to be foreseen by who changes a blob
_log = logging.getLogger(__name__)
_DAY_S = 86400.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # e.g. Lustre mounted without flock


class _Facts(NamedTuple):
    """What is known of a blob.

    Attributes:
        changed_ns: its time of change: what has another one now is no longer what was fetched.
        pieces: SHA-256 in hex of each ``PIECE`` of it.
        callers: of stores whose keys may read it.
    """

    changed_ns: int
    pieces: list[str]
    callers: list[str]


class Cache:
    """Blobs at ``<root>/blobs/ab/<digest>``, read-only, each whole and checked.

    The digest is of the object's identity (place, ETag, size), known before it is fetched. Beside
    them, at ``<root>/facts/ab/<digest>.json``, is what they must be, and who may have them. Stagers
    in any number of threads and processes may share one cache. What is evicted, and when:
    ``ddl_airflow.storage.cleaning``.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))

    def path(self, store: ObjectSource, obj: StoredObject) -> Path:
        """Where the object's blob is, or will be."""
        digest = hashlib.sha256(store.identity(obj).encode()).hexdigest()
        return Path(f"{self.root}/blobs/{digest[:2]}/{digest}")

    def holds(self, store: ObjectSource, obj: StoredObject) -> bool:
        """Whether the object's blob is there, with its size and as it was left; it is then used."""
        blob = self.path(store, obj)
        try:
            found = blob.stat()
        except FileNotFoundError:
            return False
        facts = self._facts(blob)
        if facts is None or (found.st_size, found.st_mtime_ns) != (obj.size, facts.changed_ns):
            return False
        if time.time() - self.used(blob) > _DAY_S:
            os.utime(self._facts_of(blob))
        return True

    def used(self, blob: Path) -> float:
        """When it was last used, give or take a day, in seconds since 1970."""
        try:
            return self._facts_of(blob).stat().st_mtime
        except FileNotFoundError:
            return blob.stat().st_mtime

    def evict(self, blob: Path) -> None:
        """Removes it, and what is known of it. Only for who is ``alone``."""
        blob.unlink()
        self._facts_of(blob).unlink(missing_ok=True)

    def check_access(self, store: ObjectSource, obj: StoredObject) -> None:
        """Has the store say whether the caller may have what the cache holds, if need be.

        Raises:
            AccessDenied: it may not.
        """
        blob = self.path(store, obj)
        facts = self._facts(blob)
        if facts is not None and store.caller in facts.callers:
            return
        store.check_access(obj)
        if facts is not None and store.caller:
            with os_errors(blob):
                self._keep(blob, facts._replace(callers=[*facts.callers, store.caller]))

    def drop_damaged(
        self, store: ObjectSource, objects: Sequence[StoredObject], sample_bytes: int = _SAMPLE
    ) -> list[StoredObject]:
        """Compares samples of blobs with their digests; if one differs, all of all of them.

        Returns:
            The objects whose blobs were not what was fetched, and are gone now.
        """
        left = sample_bytes
        for obj in _RANDOM.sample(objects, len(objects)):
            if left <= 0:
                return []
            left -= min(PIECE, obj.size)
            blob = self.path(store, obj)
            facts = self._facts(blob)
            with os_errors(blob):
                if facts is None or not _is(blob, facts, _RANDOM.randrange(len(facts.pieces))):
                    break
        else:
            return []
        return [obj for obj in objects if not self._is_whole(self.path(store, obj))]

    def verify(self) -> Iterator[Path]:
        """Reads all blobs; removes those that are not what was fetched, and yields them."""
        for blob in sorted((self.root / "blobs").glob("??/*")):
            if not blob.name.endswith(".part") and not self._is_whole(blob):
                yield blob

    def _is_whole(self, blob: Path) -> bool:
        with os_errors(blob):
            facts = self._facts(blob)
            if facts is not None and all(_is(blob, facts, n) for n in range(len(facts.pieces))):
                return True
            blob.unlink(missing_ok=True)
        _log.warning("%s is not what was fetched: removed", blob)
        return False

    def _facts_of(self, blob: Path) -> Path:
        return Path(f"{self.root}/facts/{blob.name[:2]}/{blob.name}.json")

    def _facts(self, blob: Path) -> _Facts | None:
        try:
            return _Facts(**json.loads(self._facts_of(blob).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _keep(self, blob: Path, facts: _Facts) -> None:
        path = self._facts_of(blob)
        new = f"{path}.{uuid.uuid4().hex}"
        with _opened(new) as file:
            file.write(json.dumps(facts._asdict()).encode())
        os.replace(new, path)

    @contextmanager
    def in_use(self, wait_s: float = 600.0) -> Iterator[None]:
        """Keeps all blobs, also those that no run links to yet. Many may do so at once.

        Args:
            wait_s: for who is ``alone``, and looks at all runs, to end.

        Raises:
            StagingError: that one has not ended.
        """
        with os_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            lock = self._in_use_lock()
        with lock:
            began, said = time.monotonic(), False
            while self._took(lock, fcntl.LOCK_SH) is False:
                if time.monotonic() - began > wait_s:
                    raise StagingError(
                        f"{lock.name}: somebody has been cleaning this cache for {wait_s:.0f} s. "
                        "See which process holds this file, on all hosts, and end it if it hangs."
                    )
                if not said:
                    _log.info("%s is being cleaned: waiting until that has ended", self.root)
                    said = True
                time.sleep(0.05)
            yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether nobody uses the cache, and then keeps it so."""
        with os_errors(self.root), self._in_use_lock() as lock:
            yield self._took(lock, fcntl.LOCK_EX) is True

    def _in_use_lock(self) -> BinaryIO:
        return open(self.root / ".in-use", "ab")

    @staticmethod
    def _took(lock: BinaryIO, how: int) -> bool | None:
        """None: the file system has no locks, so nothing of it is ever evicted."""
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            if exc.errno not in _NO_LOCKS:
                raise
            return None
        return True

    def fetch(self, store: ObjectSource, obj: StoredObject, advance: Advance) -> str:
        """Makes the blob be there.

        Returns:
            How it was checked (``ObjectStore.get``), or ``CACHED`` if it was there, maybe
            brought by another stager while this one waited for it.
        """
        blob = self.path(store, obj)
        with os_errors(blob, obj.size), self._lock(blob, advance) as locked:
            if self.holds(store, obj):
                self.check_access(store, obj)
                advance(obj.size)
                return CACHED
            part = Path(f"{blob}.{uuid.uuid4().hex}.part")
            kept = set()
            if locked and store.resumes and obj.size > PIECE:
                part = _resumed(blob)
                kept = {part.name, journal_of(part).name}
            for name in _names(blob.parent):
                # Locked: whatever is unfinished belongs to a stager that was killed.
                if locked and name.startswith(f"{blob.name}.") and name not in kept:
                    (blob.parent / name).unlink()
            try:
                fetched = store.get(obj, part, advance)
                self.add(store, obj, part, fetched.pieces)
            except BaseException as error:
                if not kept or _in_vain(error):
                    _remove(part)
                raise
            if kept:
                journal_of(part).unlink(missing_ok=True)
        return fetched.checked

    def add(self, store: ObjectSource, obj: StoredObject, part: Path, pieces: list[str]) -> None:
        """Makes a file in the cache's folder, which is whole and checked, the object's blob.

        Args:
            store, obj: what it is of.
            part: the file; gone then.
            pieces: SHA-256 in hex of each ``PIECE`` of it.
        """
        blob = self.path(store, obj)
        part.chmod(0o444)  # runs reach it through links and must not change it
        callers = [store.caller] if store.caller else []
        self._keep(blob, _Facts(part.stat().st_mtime_ns, pieces, callers))
        _names(blob.parent)
        os.replace(part, blob)

    def nbytes_of_parts(self, store: ObjectSource, obj: StoredObject) -> int:
        """What an unfinished fetch has left of the object, in bytes on disk."""
        if not store.resumes or obj.size <= PIECE:
            return 0
        try:
            return _resumed(self.path(store, obj)).stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    @contextmanager
    def alone_with(self, path: Path, advance: Advance) -> Iterator[bool]:
        """Keeps others off what is made at a path with a name of its own; as ``_lock``."""
        with os_errors(path), self._lock(path, advance) as locked:
            yield locked

    @contextmanager
    def _lock(self, blob: Path, advance: Advance) -> Iterator[bool]:
        """Keeps other stagers off this blob. Yields False where the file system cannot lock.

        Without locks two stagers may both fetch; names of their own and one rename keep that right.
        The wait ends when the holder's transfer does, or when ``advance`` raises.
        """
        lock = self.root / "locks" / blob.name
        with _opened(lock) as handle:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
                except BlockingIOError:
                    advance(0)
                    time.sleep(0.05)
                    continue
                except OSError as exc:
                    if exc.errno not in _NO_LOCKS:
                        raise
                    locked = False
                break
            yield locked
            # Only now that the blob is there: who still waits, or comes and makes a new lock, finds
            # it and fetches nothing. After an error the lock must stay for those that wait.
            lock.unlink(missing_ok=True)


def _resumed(blob: Path) -> Path:
    """The name of a large blob while it comes, by which the next stager finds it."""
    return Path(f"{blob}.bytes.part")


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    """A file to be written to, in a folder that is made if it is not there."""
    try:
        return open(path, "ab")
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return open(path, "ab")


def _names(folder: Path) -> list[str]:
    """Of what is in a folder, which is made if it is not there."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        os.makedirs(folder, exist_ok=True)
        return []


def _in_vain(error: BaseException) -> bool:
    """Whether parts that have come are of no use to the next try, or in its way."""
    if isinstance(error, (NoSpace, TransferCorrupt)):
        return True
    return isinstance(error, StagingError) and not error.retryable


def _remove(part: Path) -> None:
    part.unlink(missing_ok=True)
    journal_of(part).unlink(missing_ok=True)


def _is(blob: Path, facts: _Facts, piece: int) -> bool:
    """Whether a piece of the blob has its digest."""
    try:
        with open(blob, "rb") as file:
            file.seek(piece * PIECE)
            return _digest(file) == facts.pieces[piece]
    except FileNotFoundError:
        return False


def _digest(file: IO[bytes]) -> str:
    """Of the next piece."""
    digest, left = hashlib.sha256(), PIECE
    while left and (chunk := file.read(min(CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()

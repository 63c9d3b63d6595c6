"""Objects kept on disk by what they are, so that unchanged data is fetched once.

The cache gives an object to nobody whom the store would not give it to: who has not fetched it with
the same keys, or asked before, asks the store. What is there is what was fetched: its digests are
kept beside it, and compared with samples of it whenever it is used, with all of it on demand.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import random
import stat
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, BinaryIO, NamedTuple

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError, TransferCorrupt
from ddl_airflow.storage import checksums
from ddl_airflow.storage.download import journal_of
from ddl_airflow.storage.filesystem import DISK_FULL, os_errors
from ddl_airflow.storage.store import (
    CHUNK,
    PIECE,
    Advance,
    Fetched,
    ObjectSource,
    StoredObject,
)

CACHED = "cache"  # how an object was checked that this call did not fetch
_SAMPLE = 4 * PIECE  # bytes compared whenever a dataset is staged from the cache
_LEAST_SAMPLE = 128 * 1024  # of them, that a small blob counts as: at most 512 are compared
_FLUSHED = "flushed.json"
_SMALL = "small."  # begins names of small objects while they come
_TICK_NS = 1_000_000_000  # more than any file system rounds times by
_OF_ONE_HOST = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs"}
_RANDOM = random.SystemRandom()  # not to be foreseen by who changes a blob
_log = logging.getLogger(__name__)
_DAY_S = 86400.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # e.g. Lustre mounted without flock


class _Facts(NamedTuple):
    """What is known of a blob.

    Attributes:
        changed_ns: its time of change: what has another one now is no longer what was fetched.
        pieces: digests in hex of each piece of it.
        callers: of stores whose keys may read it.
        algorithm: of the digests, as ``checksums.new`` has it.
        piece_size: bytes.
        boot: of the host that wrote it, which may not have it on disk; empty: it is there.
        proved: as ``Fetched`` has it.
    """

    changed_ns: int
    pieces: list[str]
    callers: list[str]
    algorithm: str = "sha256"
    piece_size: int = PIECE
    boot: str = ""
    proved: Mapping[str, Any] = MappingProxyType({})


class Cache:
    """Blobs at ``<root>/blobs/ab/<digest>``, read-only, each whole and checked.

    The digest is of the object's identity (place, ETag, size), known before it is fetched. Beside
    them, at ``<root>/facts/ab/<digest>.json``, is what they must be, and who may have them. Stagers
    in any number of threads and processes may share one cache. What is evicted, and when:
    ``ddl_airflow.storage.cleaning``.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self._paths: weakref.WeakKeyDictionary[ObjectSource, dict[StoredObject, Path]]
        self._paths = weakref.WeakKeyDictionary()

    @functools.cached_property
    def _boot(self) -> str:
        """Of this host, if nobody else writes to the cache's disk; else empty."""
        return boot_id() if is_of_this_host(self.root) else ""

    def path(self, store: ObjectSource, obj: StoredObject) -> Path:
        """Where the object's blob is, or will be."""
        known = self._paths.setdefault(store, {})
        if (path := known.get(obj)) is None:
            digest = hashlib.sha256(store.identity(obj).encode()).hexdigest()
            path = known[obj] = Path(f"{self.root}/blobs/{digest[:2]}/{digest}")
        return path

    def holds(self, store: ObjectSource, obj: StoredObject) -> bool:
        """Whether the object's blob is there, with its size and as it was left; it is then used."""
        return self._held(store, obj) is not None

    def held(
        self, store: ObjectSource, objects: Iterable[StoredObject]
    ) -> tuple[dict[StoredObject, Mapping[str, Any]], list[StoredObject]]:
        """Those that ``holds`` is true of, with what was ``proved`` of each; and which of them
        ``check_access`` has to ask for.
        """
        held, to_ask, caller = {}, [], store.caller
        for obj in objects:
            if (facts := self._held(store, obj)) is not None:
                held[obj] = facts.proved
                if caller not in facts.callers:
                    to_ask.append(obj)
        return held, to_ask

    def proved(self, store: ObjectSource, obj: StoredObject) -> Mapping[str, Any]:
        """What was found out of an object when it came: ``Fetched.proved``."""
        facts = self._facts(self.path(store, obj))
        return {} if facts is None else facts.proved

    def _held(self, store: ObjectSource, obj: StoredObject) -> _Facts | None:
        blob = self.path(store, obj)
        try:
            found = os.stat(blob)
        except FileNotFoundError:
            return None
        facts, used = self._read_facts(blob)
        if facts is None or (found.st_size, found.st_mtime_ns) != (obj.size, facts.changed_ns):
            return None
        if facts.boot and facts.boot != self._boot and not self._survived(blob, facts):
            return None
        if time.time() - used > _DAY_S:
            os.utime(self._facts_of(blob))
        return facts

    def _survived(self, blob: Path, facts: _Facts) -> bool:
        """Whether a blob is whole that may not have been on disk when its host went down."""
        if facts.changed_ns >= self._flushed().get(facts.boot, 0) and not self._is_whole(blob):
            return False
        with os_errors(blob):
            _fsync(blob)
            self._keep(blob, facts._replace(boot=""))
        return True

    def flush(self) -> None:
        """Returns when all that was fetched by now is on disk."""
        if not self._boot:
            return  # each was flushed by itself
        with os_errors(self.root):
            now_ns = time.time_ns() - _TICK_NS
            _sync_file_system(self.root)
            flushed = self._flushed() | {self._boot: now_ns}
            new = self.root / f"flushed.{uuid.uuid4().hex}"
            new.write_text(json.dumps(flushed))
            new.replace(self.root / _FLUSHED)

    def _flushed(self) -> dict[str, int]:
        """Boot -> what was changed before that moment, in nanoseconds since 1970, is on disk."""
        try:
            found: dict[str, int] = json.loads((self.root / _FLUSHED).read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return found

    def used(self, blob: Path) -> float:
        """When it was last used, give or take a day, in seconds since 1970.

        By who had it staged here, read it, or sent it here for a job: ``eviction.make_room`` marks
        it in its access time. Its time of change may be the sender's, of weeks before.
        """
        found = blob.stat()
        try:
            staged = os.stat(self._facts_of(blob)).st_mtime
        except FileNotFoundError:
            staged = found.st_mtime
        return max(staged, found.st_atime)

    def evict(self, blob: Path) -> None:
        """Removes it, and what is known of it. Only for who is ``alone``."""
        blob.unlink()
        with suppress(FileNotFoundError):
            os.unlink(self._facts_of(blob))

    def check_access(self, store: ObjectSource, obj: StoredObject) -> None:
        """Has the store say whether the caller may have what the cache holds, if need be.

        Raises:
            AccessDenied: it may not.
        """
        blob = self.path(store, obj)
        facts = self._facts(blob)
        if facts is not None and store.caller in facts.callers:
            return
        with _listed():
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
            blob = self.path(store, obj)
            facts = self._facts(blob)
            left -= max(_LEAST_SAMPLE, min(facts.piece_size if facts else PIECE, obj.size))
            with os_errors(blob):
                if facts is None or not _is(blob, facts, _RANDOM.randrange(len(facts.pieces))):
                    break
        else:
            return []
        return [obj for obj in objects if not self._is_whole(self.path(store, obj))]

    def drop_if_damaged(self, store: ObjectSource, obj: StoredObject) -> bool:
        """Reads all of an object's blob. Whether it was not what was fetched, and is gone now."""
        return not self._is_whole(self.path(store, obj))

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

    def _facts_of(self, blob: Path) -> str:
        return f"{self.root}/facts/{blob.name[:2]}/{blob.name}.json"

    def _facts(self, blob: Path) -> _Facts | None:
        return self._read_facts(blob)[0]

    def _read_facts(self, blob: Path) -> tuple[_Facts | None, float]:
        """What is known, and when the blob was last used."""
        try:
            descriptor = os.open(self._facts_of(blob), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None, 0.0
        try:
            found, text = os.fstat(descriptor), b""
            while chunk := os.read(descriptor, found.st_size + 1):
                text += chunk
        finally:
            os.close(descriptor)
        try:
            return _Facts(**json.loads(text)), found.st_mtime
        except (ValueError, TypeError):
            return None, 0.0

    def _keep(self, blob: Path, facts: _Facts) -> None:
        path = self._facts_of(blob)
        text = json.dumps(facts._asdict() | {"proved": dict(facts.proved)}).encode()
        with suppress(FileNotFoundError, FileExistsError):
            # Nobody has any. Those that are cut off are as good as none.
            first = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.write(first, text)
            finally:
                os.close(first)
            return
        new = f"{path}.{uuid.uuid4().hex}"
        with _opened(new) as file:
            file.write(text)
        os.replace(new, path)

    @contextmanager
    def in_use(
        self, wait_s: float = 600.0, waiting: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Keeps all blobs, also those that no run links to yet. Many may do so at once.

        Args:
            wait_s: for who is ``alone``, and looks at all runs, to end.
            waiting: called meanwhile, time and again; ends that by raising.

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
                waiting()
                time.sleep(0.05)
            yield

    @contextmanager
    def alone(self, wait_s: float = 0.0) -> Iterator[bool | None]:
        """Whether nobody uses the cache, and then keeps it so; None: there are no locks to tell.

        Args:
            wait_s: for all who use it to end. Who comes meanwhile does not wait.
        """
        with os_errors(self.root), self._in_use_lock() as lock:
            deadline = time.monotonic() + wait_s
            while (took := self._took(lock, fcntl.LOCK_EX)) is False:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
            yield took

    def _in_use_lock(self) -> BinaryIO:
        # For reading as well: the client of NFSv4 refuses LOCK_SH with EBADF on what is not.
        return open(self.root / ".in-use", "a+b")

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

    def fetch_small(
        self,
        store: ObjectSource,
        objects: Sequence[StoredObject],
        advance: Advance,
        came: Callable[[StoredObject, str], None],
    ) -> None:
        """As ``fetch``, of many small objects whose blobs have one folder, with one lock for all.

        Args:
            store, objects: what, and where from.
            advance: as ``ObjectStore.get`` has it.
            came: called for each, with how it was checked.
        """
        folder = self.path(store, objects[0]).parent
        with os_errors(folder), self._lock(folder, advance, keep=True) as locked:
            for name in _names(folder):
                if locked and name.startswith(_SMALL):  # of a stager that was killed
                    os.unlink(folder / name)
            part = folder / f"{_SMALL}{uuid.uuid4().hex}.part"
            for obj in objects:
                if self.holds(store, obj):
                    self.check_access(store, obj)
                    advance(obj.size)
                    came(obj, CACHED)
                    continue
                with os_errors(folder, obj.size):
                    came(obj, self._bring(store, obj, part, advance))

    def _bring(
        self,
        store: ObjectSource,
        obj: StoredObject,
        part: Path,
        advance: Advance,
        *,
        kept: bool = False,
    ) -> str:
        """Fetches an object into a file that becomes its blob, or goes; or is ``kept``."""
        try:
            with _listed():
                fetched = store.get(obj, part, advance)
            self._take(store, obj, part, fetched)
        except BaseException as error:
            if not kept or _in_vain(error):
                _remove(part)
            raise
        return fetched.checked

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
                _make_writable(part)
                kept = {part.name, journal_of(part).name}
            for name in _names(blob.parent):
                # Locked: whatever is unfinished belongs to a stager that was killed.
                if locked and name.startswith(f"{blob.name}.") and name not in kept:
                    (blob.parent / name).unlink()
            checked = self._bring(store, obj, part, advance, kept=bool(kept))
            if kept:
                journal_of(part).unlink(missing_ok=True)
        return checked

    def add(self, store: ObjectSource, obj: StoredObject, part: Path, pieces: list[str]) -> None:
        """Makes a file in the cache's folder, which is whole and checked, the object's blob.

        Args:
            store, obj: what it is of.
            part: the file; gone then.
            pieces: SHA-256 in hex of each ``PIECE`` of it.
        """
        _names(self.path(store, obj).parent)
        self._take(store, obj, part, Fetched("size", pieces, piece_size=PIECE))

    def _take(self, store: ObjectSource, obj: StoredObject, part: Path, fetched: Fetched) -> None:
        blob = self.path(store, obj)
        os.chmod(part, 0o444)  # runs reach it through links and must not change it
        if not self._boot:
            _fsync(part)
        facts = _Facts(
            os.stat(part).st_mtime_ns,
            fetched.pieces,
            [store.caller] if store.caller else [],
            fetched.algorithm,
            fetched.piece_size,
            self._boot,
            fetched.proved,
        )
        self._keep(blob, facts)
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
    def _lock(self, blob: Path, advance: Advance, *, keep: bool = False) -> Iterator[bool]:
        """Keeps other stagers off this blob. Yields False where the file system cannot lock.

        Without locks two stagers may both fetch; names of their own and one rename keep that right.
        The wait ends when the holder's transfer does, or when ``advance`` raises. ``keep``: of a
        folder, in which others wait for other blobs: the lock stays for all of them.
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
            if not keep:
                lock.unlink(missing_ok=True)


def boot_id() -> str:
    """Of this host, another one whenever it starts; empty: it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_of_this_host(folder: Path) -> bool:
    """Whether a folder, which is made if need be, is on a file system that no other host has."""
    with os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        device = folder.stat().st_dev
    try:
        lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number]
    return bool(kinds) and {*kinds} <= _OF_ONE_HOST


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file_system(folder: Path) -> None:
    """syncfs(2), which Python does not have."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(folder))
    finally:
        os.close(descriptor)


def _resumed(blob: Path) -> Path:
    """The name of a large blob while it comes, by which the next stager finds it."""
    return Path(f"{blob}.bytes.part")


def _make_writable(part: Path) -> None:
    """Lets its owner go on with what is read-only because a stager was killed just before it became
    a blob. Another user's goes: only its owner may make it read-only in the end.
    """
    try:
        part.chmod(stat.S_IMODE(part.stat().st_mode) | stat.S_IWUSR)
    except FileNotFoundError:
        pass
    except PermissionError:
        _remove(part)


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


@contextmanager
def _listed() -> Iterator[None]:
    """Of an object that was listed before: that it is missing is nothing that stays so."""
    try:
        yield
    except SourceMissing as error:
        raise SourceMissing(
            f"{error} It went since the data were listed.", retryable=True
        ) from error


def _in_vain(error: BaseException) -> bool:
    """Whether parts that have come are of no use to the next try, or in its way."""
    if isinstance(error, (NoSpace, SourceMissing, TransferCorrupt)):
        return True
    if isinstance(error, OSError):  # over NFS, a full disk is told when the last is flushed
        return error.errno in DISK_FULL
    return isinstance(error, StagingError) and not error.retryable


def _remove(part: Path) -> None:
    part.unlink(missing_ok=True)
    journal_of(part).unlink(missing_ok=True)


def _is(blob: Path, facts: _Facts, piece: int) -> bool:
    """Whether a piece of the blob has its digest."""
    try:
        with open(blob, "rb", buffering=0, opener=_unnoticed) as file:
            file.seek(piece * facts.piece_size)
            return _digest(file, facts) == facts.pieces[piece]
    except (FileNotFoundError, ValueError):  # or a digest that only a later version knows
        return False


def _unnoticed(path: str, flags: int) -> int:
    """Opens a blob and leaves its access time: to compare it is no use of it."""
    try:
        return os.open(path, flags | os.O_NOATIME)
    except PermissionError:  # another user's
        return os.open(path, flags)


def _digest(file: IO[bytes], facts: _Facts) -> str:
    """Of the next piece."""
    digest = checksums.new(facts.algorithm)
    left = facts.piece_size
    while left and (chunk := file.read(min(CHUNK, left))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()

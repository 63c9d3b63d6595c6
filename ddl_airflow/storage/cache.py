"""Objects kept on disk by what they are, so that unchanged data is fetched once."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.store import Advance, ObjectStore, StoredObject

CACHED = "cache"  # how an object was checked that this call did not fetch
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # e.g. Lustre mounted without flock


class Cache:
    """Blobs at ``<root>/blobs/ab/<digest>``, read-only, each whole and checked.

    The digest is of the object's identity (place, ETag, size), known before it is fetched. Stagers
    in any number of threads and processes may share one cache. Nothing is ever evicted: delete
    the folder, or blobs in it, while no run uses them.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))

    def path(self, store: ObjectStore, obj: StoredObject) -> Path:
        """Where the object's blob is, or will be."""
        digest = hashlib.sha256(store.identity(obj).encode()).hexdigest()
        return self.root / "blobs" / digest[:2] / digest

    def holds(self, store: ObjectStore, obj: StoredObject) -> bool:
        """Whether the object's blob is there with the right size."""
        try:
            return self.path(store, obj).stat().st_size == obj.size
        except FileNotFoundError:
            return False

    def fetch(self, store: ObjectStore, obj: StoredObject, advance: Advance) -> str:
        """Makes the blob be there.

        Returns:
            How it was checked (``ObjectStore.get``), or ``CACHED`` if it was there, maybe
            brought by another stager while this one waited for it.
        """
        blob = self.path(store, obj)
        with os_errors(blob, obj.size):
            blob.parent.mkdir(parents=True, exist_ok=True)
            with self._lock(blob, advance) as locked:
                if self.holds(store, obj):
                    advance(obj.size)
                    return CACHED
                if locked:  # so whatever is unfinished belongs to a stager that was killed
                    for stale in blob.parent.glob(f"{blob.name}.*.part"):
                        stale.unlink()
                part = blob.with_name(f"{blob.name}.{uuid.uuid4().hex}.part")
                try:
                    checked = store.get(obj, part, advance)
                    part.chmod(0o444)  # runs reach it through links and must not change it
                    os.replace(part, blob)
                finally:
                    part.unlink(missing_ok=True)
        return checked

    @contextmanager
    def _lock(self, blob: Path, advance: Advance) -> Iterator[bool]:
        """Keeps other stagers off this blob. Yields False where the file system cannot lock.

        Without locks two stagers may both fetch; names of their own and one rename keep that right.
        The wait ends when the holder's transfer does, or when ``advance`` raises.
        """
        lock = self.root / "locks" / blob.name
        lock.parent.mkdir(parents=True, exist_ok=True)
        with open(lock, "ab") as handle:
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

"""What was read of files, for as long as these do not change.

A page that is open asks every 2 seconds for what thousands of ranks have recorded, of which next to
nothing changes. To look at a file costs far less than to read it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.layout import names_in

_Part = TypeVar("_Part")
_MOST = 20_000
_MOST_BYTES = 16 * 2**20
# In one answer: with what ranks say elsewhere fewer than are kept, or each would be read each time.
_MOST_FILES = 15_000
# In all folders that are listed for one answer: of each rank there are some files.
_MOST_NAMES = 100_000
# Of a larger one, of which reading takes five times as much memory, only one is read at once.
_LARGE = 4 * 2**20
# A file that was written within that time may be written once more without its times telling.
_SETTLED_S = 2.0


class Budget:
    """How much may be read for one answer: ranks may write what they like.

    Args:
        left: bytes.
    """

    def __init__(self, left: int) -> None:
        self._left = left
        self._files = _MOST_FILES
        self._names = _MOST_NAMES

    @property
    def spent(self) -> bool:
        """Whether no further folder may be looked at."""
        return self._files <= 0 or self._names <= 0

    def names(self, folder: Path) -> list[str]:
        """Names in a folder, in no order, as many as are left."""
        found = names_in(folder, self._names)
        self._names -= len(found)
        return found

    def look(self, path: Path) -> None:
        """Raises FileRefused if it is one file too many."""
        if self._files <= 0:
            raise FileRefused(f"{path} is one of too many files for a page.")
        self._files -= 1

    def take(self, path: Path, size: int) -> None:
        """Raises FileRefused if the file would be more than is left."""
        if size > self._left:
            raise FileRefused(f"{path}, with what was read before it, is too much for a page.")
        self._left -= size


class Unchanged:
    """Parts of JSON files, read again when the file is another.

    Args:
        most: how many parts are kept; fewer where they are not small.

    Attributes:
        reads: how many files were read so far.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = most or _MOST
        self._known: dict[tuple[Path, object], tuple[Any, Any]] = {}
        self._lock, self._large = threading.Lock(), threading.Lock()
        self.reads = 0

    def read(
        self,
        path: Path,
        root: Path,
        part: Callable[[Mapping[str, Any]], _Part],
        *,
        budget: Budget | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> _Part:
        """What ``part`` takes of the object in a file; it is kept, so it should be small.

        Args:
            path, root: as ``read_object`` has them.
            part: a function of a module: what it took before counts for it alone.
            budget: of the answer that it is for; what was read before takes no bytes of it.
            most_bytes: of the file.

        Raises:
            FileRefused, OSError: as ``read_object``; FileRefused, too, if the budget is spent.
        """
        if budget is not None:
            budget.look(path)
        stat = os.lstat(path)
        # Before the file is read: one that is replaced meanwhile is read again next time.
        stamp = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev)
        known = self._known.get((path, part))
        waits = stat.st_size > _LARGE and (known is None or known[0] != stamp)
        with self._large if waits else nullcontext():  # who has waited may find it read
            return self._part(path, root, part, stamp, budget, most_bytes)

    def _part(
        self,
        path: Path,
        root: Path,
        part: Callable[[Mapping[str, Any]], _Part],
        stamp: tuple[int, ...],
        budget: Budget | None,
        most_bytes: int,
    ) -> _Part:
        written_ns, _, size, *_ = stamp
        known = self._known.get((path, part))
        if known is not None and known[0] == stamp:
            taken: _Part = known[1]
            return taken
        self.reads += 1
        if budget is not None:
            budget.take(path, min(size, most_bytes))
        taken = part(read_object(path, root, most_bytes))
        if time.time() - written_ns / 1e9 > _SETTLED_S:
            with self._lock:
                self._known.pop((path, part), None)
                if len(self._known) >= self._most:
                    del self._known[next(iter(self._known))]  # the oldest
                self._known[path, part] = (stamp, taken)
        return taken

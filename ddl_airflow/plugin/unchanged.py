"""What was read of files, for as long as these do not change.

A page that is open asks every 2 seconds for what thousands of ranks have recorded, of which next to
nothing changes. To look at a file costs far less than to read it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ddl_airflow.core.beneath import read_object

_Part = TypeVar("_Part")
_MOST = 20_000
# A file that was written within that time may be written once more without its times telling.
_SETTLED_S = 2.0


class Unchanged:
    """Parts of JSON files, read again when the file is another.

    Attributes:
        reads: how many files were read so far.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Path, object], tuple[Any, Any]] = {}
        self.reads = 0

    def read(self, path: Path, root: Path, part: Callable[[Mapping[str, Any]], _Part]) -> _Part:
        """What ``part`` takes of the object in a file; it is kept, so it should be small.

        Args:
            path, root: as ``read_object`` has them.
            part: a function of a module: what it took before counts for it alone.

        Raises:
            FileRefused, OSError: as ``read_object``.
        """
        stat = os.lstat(path)
        # Before the file is read: one that is replaced meanwhile is read again next time.
        stamp = (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev)
        known = self._known.get((path, part))
        if known is not None and known[0] == stamp:
            taken: _Part = known[1]
            return taken
        self.reads += 1
        taken = part(read_object(path, root))
        if time.time() - stat.st_mtime > _SETTLED_S:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[path, part] = (stamp, taken)
        return taken

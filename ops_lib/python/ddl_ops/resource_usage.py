"""What a rank takes of its host while it runs: cores and memory of the script and all it started.

Nothing is asked of the script: the kernel keeps count, in ``/proc``. Source: proc(5).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddl_ops.gpu_usage import GpuUsage

# Short trainings are to be seen, too.
_FIRST_S, _EACH_S = 1.0, 5.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def usage_file(directory: Path, rank: int) -> Path:
    """Where a rank's shim says what the rank takes."""
    return directory / f"rank-{rank}.usage"


class ResourceUsage:
    """Looks at a process and its descendants every few seconds, and writes what they take.

    The file has one JSON object, replaced each time: ``t`` (unix seconds), ``cores`` (used since
    the last look, on average), ``cpu_s`` (since the start), ``memory`` (bytes that are resident,
    summed over the processes: pages that they share count for each) and ``peak`` (the most of
    these); and what ``GpuUsage`` knows.

    Args:
        path: the file.
        pid: the process.
        gpu: of the rank; it is started when there is something to look at.
    """

    def __init__(self, path: Path, pid: int, gpu: GpuUsage | None = None) -> None:
        self._path = path
        self._pid = pid
        self._gpu = gpu
        self._at = time.monotonic()
        self._due = self._at + _FIRST_S
        self._cpu_s = 0.0
        self._peak = 0

    def look(self) -> None:
        """Does so if it is time. What cannot be read or written is left out: nothing needs it."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _EACH_S
        if self._gpu is not None and self._gpu.ident is None:
            self._gpu.start()
        found = list(_processes(self._pid))
        # Of one that ended meanwhile and that nobody has waited for, the time is lost.
        cpu_s = max(self._cpu_s, sum(spent for spent, _ in found))
        memory = sum(resident for _, resident in found)
        self._peak = max(self._peak, memory)
        told = {
            "t": round(time.time(), 3),
            "cores": round((cpu_s - self._cpu_s) / (now - self._at), 2),
            "cpu_s": round(cpu_s, 2),
            "memory": memory,
            "peak": self._peak,
            **(self._gpu.taken() if self._gpu is not None else {}),
        }
        self._at, self._cpu_s = now, cpu_s
        partial = self._path.with_suffix(".usage-partial")
        with suppress(OSError):  # the disk is full: the record says so
            partial.write_text(json.dumps(told), "utf-8")
            partial.replace(self._path)


def _processes(pid: int) -> Iterator[tuple[float, int]]:
    """CPU seconds, with those of children that have been waited for, and resident bytes of each."""
    stack = [pid]
    while stack:
        folder = Path(f"/proc/{stack.pop()}")
        with suppress(OSError):  # it has ended
            # The name, in brackets, may have any character in it.
            fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
            yield sum(map(int, fields[11:15])) / _TICKS, int(fields[21]) * _PAGE_BYTES
            for thread in os.scandir(folder / "task"):
                with suppress(OSError):
                    stack += map(int, Path(thread.path, "children").read_bytes().split())

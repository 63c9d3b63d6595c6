"""Processes of this host that carry a mark in their environment.

A child inherits its parent's environment, whatever it does to its session, its group or its
parent. So a mark finds every process of a job, also one that detached itself; it is seen by the
process's own user, and by who may trace others (CAP_SYS_PTRACE).
Source: proc(5), ``/proc/<pid>/environ``; ptrace(2), Ptrace access mode checking.

``python -SE processes.py NAME VALUE [USER]`` kills what is marked so, as that user if it is root's.
"""

from __future__ import annotations

import os
import pwd
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

_PAUSE_S = 0.01


def marked(name: str, value: str) -> list[int]:
    """The ids of all living processes, but this one, that were started with NAME=VALUE."""
    mark = f"{name}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it ended meanwhile, or belongs to another user
    return found


def ranks_of(mpirun: int) -> list[int]:
    """What an mpirun has started for its ranks on this host; empty if it is none, or has ended."""
    found = []
    for children in Path(f"/proc/{mpirun}/task").glob("*/children"):
        with suppress(OSError):  # the thread, or what it started, ended meanwhile
            for pid in children.read_text("utf-8").split():
                if b"\0OMPI_COMM_WORLD_RANK=" in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(int(pid))
    return found


def kill_marked(name: str, value: str, within_s: float = 30.0) -> list[str]:
    """SIGKILL to every marked process, until there is none; they may be starting others.

    Args:
        name, value: the mark.
        within_s: how long to wait for their end. One in uninterruptible sleep, in the kernel, ends
            when what it waits for answers.

    Returns:
        A few words on each that is still there.
    """
    killing = _Killing(name, value)
    killing.start()
    killing.join(within_s)
    killing.stopped = True
    if not killing.is_alive():
        return []
    if killing.there is None:
        return [f"processes that cannot be seen (/proc did not answer within {within_s:g} s)"]
    return [said_of(pid) for pid in killing.there]


class _Killing(threading.Thread):
    """A thread, for a look at such a process may not come back either. Source: proc(5), mmap_lock.

    Attributes:
        there: ids of marked processes; None before the first look at them has come back.
        stopped: set to end it.
    """

    def __init__(self, name: str, value: str) -> None:
        super().__init__(daemon=True, name="ddl-killing")
        self._mark = (name, value)
        self.there: list[int] | None = None
        self.stopped = False

    def run(self) -> None:
        """Ends when no such process is left."""
        while not self.stopped:
            self.there = marked(*self._mark)
            if not self.there:
                return
            for pid in self.there:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # it ended by itself
            time.sleep(_PAUSE_S)


def said_of(pid: int) -> str:
    """A process in words: id, name, and where in the kernel it sleeps."""
    folder = Path("/proc", str(pid))
    try:
        name, _, rest = (folder / "stat").read_text("utf-8", "replace").rpartition(")")
        state = rest.split()[0]
        said = name.partition("(")[2]
        if state == "D":
            said += f", in uninterruptible sleep in {(folder / 'wchan').read_text() or '?'}"
    except (OSError, IndexError):
        said = "ending"
    return f"process {pid} ({said})"


def _become(user: str) -> None:
    found = pwd.getpwnam(user)
    os.initgroups(user, found.pw_gid)
    os.setgid(found.pw_gid)
    os.setuid(found.pw_uid)


if __name__ == "__main__":
    if sys.argv[3:] and os.geteuid() == 0:
        _become(sys.argv[3])
    if left := kill_marked(sys.argv[1], sys.argv[2], within_s=2.0):
        sys.exit(", ".join(left))

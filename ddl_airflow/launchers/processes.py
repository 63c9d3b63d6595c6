"""Processes of this host that carry a mark in their environment.

A child inherits its parent's environment, whatever it does to its session, its group or its
parent. So a mark finds every process of a job, also one that detached itself.
Source: proc(5), ``/proc/<pid>/environ``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
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


def kill_marked(name: str, value: str) -> None:
    """SIGKILL to every marked process, until there is none; they may be starting others."""
    while pids := marked(name, value):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    kill_marked(*sys.argv[1:])

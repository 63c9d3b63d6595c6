"""Run a program so that nothing of it is left, however it or its starter ends.

``python -SE guard.py PARENT_PID GRACE_S COMMAND …`` starts COMMAND and stays beside it. On SIGTERM,
or when the parent dies, COMMAND gets SIGTERM; after the grace, or when it has ended by itself, all
that it started and left gets SIGKILL. Exits with its exit code, 128 + signal for a signal.

Orphans of a subreaper's children become its own children, whatever they did to their group,
session or environment (Airflow's workers overwrite theirs). Source: prctl(2),
PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG; proc(5), ``children``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.05


def main(argv: list[str]) -> int:
    """Returns when COMMAND has ended and nothing of it is left."""
    parent, grace_s, command = int(argv[0]), float(argv[1]), argv[2:]
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    asked: list[float] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.append(time.monotonic()))
    if os.getppid() != parent:  # it died before the kernel was asked
        return 1
    # It, too, when this process is killed.
    child = subprocess.Popen(command, preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM))
    told = False
    while child.poll() is None:
        if asked and not told:
            child.terminate()
            told = True
        if told and time.monotonic() - asked[0] > grace_s:
            child.kill()
        time.sleep(_LOOK_S)
    _kill_descendants()
    code = child.returncode
    return code if code >= 0 else 128 - code


def _kill_descendants() -> None:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := [int(word) for word in children.read_text().split()]:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)  # what it had started comes to this process now


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

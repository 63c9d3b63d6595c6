"""Become another program that ends with the process that started it.

``python -SE tether.py PARENT_PID COMMAND …``: asks Linux for SIGTERM when the parent dies, then
executes COMMAND in place. A task process that is killed with SIGKILL cannot clean up; so mpirun,
tethered to it, gets SIGTERM from the kernel and takes its ranks along.

A program and not a ``preexec_fn``: the task process has threads, in which code between fork and
exec is unsafe. Source: prctl(2), PR_SET_PDEATHSIG; it survives execve of ordinary programs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on this process gets SIGTERM when the one that started it ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def tethered(command: Sequence[str]) -> list[str]:
    """The command line that runs ``command`` so that it ends with this process."""
    return [sys.executable, "-SE", __file__, str(os.getpid()), *command]


def main(argv: list[str]) -> None:
    """Never returns: executes ``argv[1:]`` tethered to process ``argv[0]``."""
    parent, command = int(argv[0]), argv[1:]
    end_with_parent()
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(f"the process {parent} that started this one has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Become another program that ends with the process that started it.

``python -SE tether.py PARENT_PID SECONDS COMMAND …``: asks Linux for SIGTERM when the parent dies,
and for SIGALRM after so many seconds, 0 for never; then executes COMMAND in place. A task process
that is killed with SIGKILL cannot clean up; so mpirun, tethered to it, gets SIGTERM from the kernel
and takes its ranks along.

A program and not a ``preexec_fn``: the task process has threads, in which code between fork and
exec is unsafe. Source: prctl(2), PR_SET_PDEATHSIG; it survives execve of ordinary programs, as
alarm(2) does.
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


def tethered(command: Sequence[str], limit_s: int = 0) -> list[str]:
    """The command line that runs ``command`` so that it ends with this process.

    Args:
        command: to be run.
        limit_s: after which it ends in any case, also where this process stands still; 0 for none.
    """
    return [sys.executable, "-SE", __file__, str(os.getpid()), str(limit_s), *command]


def main(argv: list[str]) -> None:
    """Never returns: executes ``argv[2:]`` tethered to process ``argv[0]``, for ``argv[1]`` s."""
    parent, limit_s, command = int(argv[0]), int(argv[1]), argv[2:]
    end_with_parent()
    signal.alarm(limit_s)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(f"the process {parent} that started this one has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

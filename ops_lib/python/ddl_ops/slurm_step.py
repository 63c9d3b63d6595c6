"""Sees to it that ranks in a Slurm job are told, and not ended, when the job is to make room.

Slurm sends SIGTERM to all processes of a job's steps then, and SIGKILL when the partition's
GraceTime is over. It does not tell the batch script, nor what runs in it, as mpirun does.

``python -m ddl_ops.slurm_step --tell PID NOTE`` is a step that waits for that signal, leaves the
file NOTE, and passes SIGURG to mpirun, which passes it on to all ranks: again and again, for a
script may not listen yet. ``python -m ddl_ops.slurm_step PROGRAM …`` is PROGRAM with SIGTERM
blocked: for mpirun's daemons on other nodes, which would end their ranks. mpirun ends them by a
message, and Slurm by SIGKILL.

Standard library only: it runs before the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

_EVERY_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Returns 0 when who was to be told has ended; else becomes the program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if argv[0] != "--tell":
        os.execvp(argv[0], list(argv))
    pid, note = int(argv[1]), Path(argv[2])
    signal.sigwait({signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the next one ends this
    with contextlib.suppress(ProcessLookupError):
        # Slurm ends this step, too, when mpirun has ended by itself: then there is nobody to tell.
        os.kill(pid, signal.SIGURG)
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            note.touch(exist_ok=False)
        while True:
            time.sleep(_EVERY_S)
            os.kill(pid, signal.SIGURG)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Sees to it that ranks in a Slurm job are told, and not ended, when the job is to make room.

Slurm sends SIGTERM to all processes of a job's steps then, and SIGKILL when the partition's
GraceTime is over. It does not tell the batch script, nor what runs in it, as mpirun does.

``python -m ddl_ops.slurm_step --tell PID`` is a step that waits for that signal, and passes SIGURG
to mpirun, which passes it on to all ranks. ``python -m ddl_ops.slurm_step PROGRAM …`` is PROGRAM
with SIGTERM blocked: for mpirun's daemons on other nodes, which would end their ranks. mpirun ends
them by a message, and Slurm by SIGKILL.

Standard library only: it runs before the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Returns 0 when it has told; else becomes the program."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if argv[0] != "--tell":
        os.execvp(argv[0], list(argv))
    signal.sigwait({signal.SIGTERM})
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.kill(int(argv[1]), signal.SIGURG)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

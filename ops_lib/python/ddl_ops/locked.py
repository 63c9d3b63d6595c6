"""Runs a command while a lock is held, on a node where a scheduler starts it.

``python -m ddl_ops.locked [--keep FOLDER COPY] LOCK WHO -- WORD ...``

The command inherits the lock, and the kernel lets it go when the last process that has it has
ended. Who holds it stands in the file. What lies there belongs to scripts as well, so a link is not
followed, and nothing but a regular file is opened: a shell's ``>>`` would write through a link.

With ``--keep``, a folder is copied after a command that has ended well (``ddl_ops.experiment``),
before another may have the lock.

Standard library only: it runs before whatever the command imports.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddl_ops.experiment import keep

# Neither of Python's codes nor of a shell's. Source: sysexits.h, EX_TEMPFAIL and EX_NOPERM.
TAKEN = 75
REFUSED = 77
# Some look for a moment whether anybody has it.
_LOOK_S = 5.0
_PAUSE_S = 0.1
# What mpirun passes on to ranks, and would end this process: SIGURG asks them to make room, the
# others are what a scheduler may be told to warn a job with (sbatch --signal).
_PASSED_ON = (signal.SIGURG, signal.SIGUSR1, signal.SIGUSR2)


def lock(path: Path, who: str) -> None:
    """Takes the lock, for this process and what it executes.

    Raises:
        SystemExit: TAKEN if another has it, REFUSED if it cannot be had; the reason was printed.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    host = socket.gethostname()
    try:
        file = os.open(path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            _end(REFUSED, f"{path} is no file. Remove it; nothing is locked by it.")
        _lock_soon(file)
    except BlockingIOError:
        other = os.pread(file, 4096, 0).decode("utf-8", "replace").strip()
        _end(
            TAKEN,
            f"another training works there now: {other or 'unknown'}. Wait for its end; for an "
            "experiment, choose another experiment_id.",
        )
    except OSError as error:
        cure = "Mount the workspace there with locks; if a link is there, remove it."
        if isinstance(error, PermissionError):
            cure = f"Let user {os.geteuid()} write to it."
        _end(REFUSED, f"cannot lock {path} on {host}: {error.strerror}. {cure}")
    os.ftruncate(file, 0)
    os.pwrite(file, f"{who} on {host}".encode(), 0)
    os.set_inheritable(file, True)


def _lock_soon(file: int) -> None:
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _end(code: int, message: str) -> None:
    print(message, file=sys.stderr)
    raise SystemExit(code)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m ddl_ops.locked", description=__doc__)
    parser.add_argument(
        "--keep", nargs=2, type=Path, metavar=("FOLDER", "COPY"), help="copied when all went well"
    )
    parser.add_argument("lock", type=Path, help="file; made if it is not there")
    parser.add_argument("who", help="asks for it; others are told")
    parser.add_argument("command", nargs="+", help="what runs, after --")
    given = parser.parse_args(argv)
    lock(given.lock, given.who)
    if given.keep is None:
        os.execvp(given.command[0], given.command)
    # Who ends the job ends all its processes. This one waits for the command, which writes last
    # checkpoints. A function, unlike SIG_IGN, is not inherited.
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    running = subprocess.Popen(  # it inherits the lock
        given.command, close_fds=False, preexec_fn=_unblock
    )
    for number in _PASSED_ON:
        signal.signal(number, lambda signum, _frame: running.send_signal(signum))
    _unblock()
    code = running.wait()
    if code == 0:
        keep(*given.keep)
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()

"""Keeps two jobs from committing in one folder. Imports no framework.

Rank 0 has a lock there from its first state to its end; who starts a job again and again has it
meanwhile (``ddl_airflow.launchers.elastic``). Who has it stands in the file.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from ddl_ops.arrays import say

# Known to ddl_airflow.launchers.elastic, too.
NAME = ".horovod-lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# A rank that was killed may take a moment to be gone.
_LOOK_S = 5.0
_PAUSE_S = 0.1
_held: dict[Path, int] = {}


def hold(folder: Path) -> None:
    """Has the lock until this process ends. Makes the folder.

    Where its file system has no locks it says so, once.

    Raises:
        RuntimeError: another job has it.
        OSError: the folder cannot be written.
    """
    folder = folder.resolve()
    if folder in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    until = time.monotonic() + _LOOK_S
    while (file := _try_lock(path)) is None:
        if time.monotonic() > until:
            who = ""
            with suppress(OSError):
                who = path.read_text("utf-8", "replace").strip()
            raise RuntimeError(
                f"hvd.elastic: another job commits in {folder}: {who or path}. Give each job a "
                "CHECKPOINT_DIR of its own, or wait for its end."
            )
        time.sleep(_PAUSE_S)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    if not _held:
        atexit.register(_let_go)
        os.register_at_fork(after_in_child=_forget)
    _held[folder] = file


def _try_lock(path: Path) -> int | None:
    """The locked file, which what is executed does not inherit; None if another has the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), path.lstat()):
            return file
    except (BlockingIOError, FileNotFoundError):  # the latter: who had it has just removed it
        pass
    except OSError as error:
        if error.errno in _NO_LOCKS:
            say(
                f"hvd.elastic: {path.parent}: {error.strerror}: the file system has no locks, so "
                "see to it that no other job commits there"
            )
            return file
        raise
    os.close(file)
    return None


def _let_go() -> None:
    for folder in _held:
        with suppress(OSError):
            (folder / NAME).unlink()


def _forget() -> None:
    """In a fork, which may outlive the rank."""
    for file in _held.values():
        os.close(file)
    _held.clear()

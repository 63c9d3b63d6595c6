"""Become mpirun with a session directory that is gone when it has ended, however it ends.

``python -SE session_directory.py MPIRUN ARGUMENTS …``: makes a directory of the job's own, lets
Open MPI keep there what it would else put into ``/dev/shm`` and ``$TMPDIR``, and executes MPIRUN in
place. Open MPI removes its files by itself unless ranks, or mpirun, are killed with SIGKILL.

The removal waits in a process of its own, which reads from a pipe whose other end only mpirun has:
the kernel closes that. Where a whole container or batch job is killed, that process too, the next
run removes the directory: it takes each that nobody holds the lock of.

A program and not a function, so that mpirun keeps the process, as in ``tether``.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "ddl-mpi-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
# What Open MPI keeps beside the segments, a quarter of this where it was looked at. Of the segments
# it knows itself whether there is room.
_ROOM_BYTES = 1 << 20

# Once renamed, no process that is just ending can create anything more in it.
_REMOVE = """
exec 3<&0
{ trap '' HUP INT TERM; read -r _ <&3; mv "$0" "$0.ended" && rm -rf "$0.ended"; } &
"""


def argv(command: Sequence[str], python: str = sys.executable) -> list[str]:
    """The command line that runs mpirun's ``command`` with a session directory of its own."""
    return [python, "-SE", __file__, *command]


def settings(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What makes Open MPI 5 use the directory; what a site has set in ``environ`` stays.

    Source: the parameters' own descriptions, ``prte_info --all`` and ``ompi_info --all``.
    """
    wanted = {
        # mpirun's own: on other hosts there is no such directory.
        "PRTE_MCA_prte_local_tmpdir_base": ("PRTE_MCA_prte_tmpdir_base",),
        "OMPI_MCA_btl_sm_backing_directory": ("OMPI_MCA_btl_vader_backing_directory",),
    }
    return {
        name: str(directory)
        for name, others in wanted.items()
        if not any(one in environ for one in (name, *others))
    }


def usual_base() -> Path:
    """Where such directories are made."""
    # Memory, as Open MPI itself chooses for its segments, where there is some.
    try:
        room = shutil.disk_usage(_SHARED_MEMORY).free >= _ROOM_BYTES
    except OSError:
        room = False
    if room and os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        return _SHARED_MEMORY
    return Path(tempfile.gettempdir())


@contextmanager
def _locked(directory: Path, operation: int) -> Iterator[int | None]:
    """The directory's descriptor with a lock, or None: another process has it, or it is gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        yield None
        return
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        same = os.path.samestat(os.fstat(descriptor), os.stat(directory))
        yield descriptor if same else None
    except OSError:
        yield None
    finally:
        os.close(descriptor)


def remove_stale(base: Path) -> None:
    """Removes the directories of jobs of this user that ended with whoever should have done it."""
    for directory in base.glob(f"{_PREFIX}*"):
        try:
            mine = directory.lstat().st_uid == os.geteuid()
        except FileNotFoundError:
            continue  # its own process was faster
        if mine:
            with _locked(directory, fcntl.LOCK_EX) as descriptor:
                if descriptor is not None:
                    shutil.rmtree(directory, ignore_errors=True)  # perhaps others do the same


def create(base: Path, prefix: str = _PREFIX) -> Path:
    """A new directory, which goes when this process, or what it executes, has ended.

    Args:
        base: where.
        prefix: of its name; with another than the usual one it is never taken for stale.
    """
    return _create(base, prefix)[0]


@contextmanager
def created(base: Path, prefix: str = _PREFIX) -> Iterator[Path]:
    """A new directory as ``create`` makes it, which goes sooner: at the end of the context."""
    directory, *held = _create(base, prefix)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        for descriptor in held:
            os.close(descriptor)


def _create(base: Path, prefix: str) -> tuple[Path, int, int]:
    """It, and what holds it: what keeps others from removing it, and what the removal waits for."""
    while True:
        directory = base / f"{prefix}{os.getpid()}-{secrets.token_hex(4)}"
        reader, writer = os.pipe()
        # Before there is a directory, so that there is no moment at which it could stay. Nothing
        # of the job around it: neither its environment, by which the job is ended, nor its output.
        subprocess.run(
            ["/bin/sh", "-c", _REMOVE, str(directory)],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            cwd="/",
            start_new_session=True,
            check=True,
        )
        os.close(reader)
        directory.mkdir(mode=0o700)
        # Before there is a lock another run may take it for stale.
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            os.close(writer)
            continue
        with suppress(
            OSError
        ):  # a file system without locks: there no other run can take it either
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if directory.exists():
            os.set_inheritable(writer, True)
            os.set_inheritable(descriptor, True)
            return directory, descriptor, writer
        os.close(descriptor)
        os.close(writer)


def main(command: Sequence[str]) -> None:
    """Never returns: executes ``command``."""
    base = usual_base()
    remove_stale(base)
    directory = create(base)
    # The rank shim, ddl_ops.rank, ends its script when this process has ended.
    mpirun = {"DDL_MPIRUN": f"{os.getpid()}@{os.uname().nodename}"}
    env = {**os.environ, **settings(directory, os.environ), **mpirun}
    os.execve(command[0], list(command), env)


if __name__ == "__main__":
    main(sys.argv[1:])

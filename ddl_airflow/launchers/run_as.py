"""Run a command as another user: trainings, apart from what Airflow may read.

Where Airflow's tasks run as root, the kernel is asked; else ``sudo``, which needs a rule without a
password: ``airflow ALL=(trainer) NOPASSWD: ALL``. Neither changes more than the user.

``python -SE run_as.py USER COMMAND …`` then runs as that user. Its standard input is a socket, and
brings what sudo takes away and no list of processes should show: the environment, and descriptors
that the command inherits. The socket also holds the command: when its other end is closed, because
the job is cancelled or the process that had it was killed, the command gets SIGTERM, and SIGKILL
whatever of it is left. So nobody needs the right to signal another user's processes.

``python -SE run_as.py --once USER COMMAND …`` becomes the command; the environment comes first in
its standard input.

``python -SE run_as.py --bound USER COMMAND …`` holds a command that has a standard input of its
own: where the socket is closed, or its time is over, it is killed, with what it has started.
Where Airflow's tasks run as root this runs as root, and the command alone as the user, who need not
be able to read this Python.

A program of the standard library alone, read as a file: it runs in the ranks' Python.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

# The group reads and writes: Airflow's user may be in it. Others do not.
UMASK = 0o007
# Less than Airflow waits: see ddl_airflow.launchers.base.GRACE_S.
_GRACE_S = 2.5
_LENGTH = 8  # hexadecimal digits
_MOST_DESCRIPTORS = 8
_PR_SET_PDEATHSIG = 1
_REFUSED = 125


def account(user: str) -> pwd.struct_passwd | None:
    """The user's entry; None for no name, and for the user that this process runs as.

    Raises:
        KeyError: this host has no such user.
    """
    if not user:
        return None
    found = pwd.getpwnam(user)
    return None if found.pw_uid == os.geteuid() else found


def argv(user: str, python: str, command: Sequence[str], how: str = "") -> list[str]:
    """The line that runs a command as the user: to be started with ``identity``.

    Args:
        user, python, command: those.
        how: ``--once``, or empty; or ``--bound``, to be started without ``identity``.
    """
    words = [python, "-SE", __file__, *([how] if how else []), user, *command]
    own = not user or os.geteuid() == 0
    return words if own else [_sudo(), "-n", "-u", user, "--", *words]


def identity(user: str) -> dict[str, Any]:
    """What ``subprocess`` needs besides: nothing where sudo does it."""
    if os.geteuid() != 0:
        return {}
    found = pwd.getpwnam(user)
    groups = os.getgrouplist(user, found.pw_gid)
    return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": groups}


def environment(user: str) -> dict[str, str]:
    """What tells a process whose it is."""
    found = pwd.getpwnam(user)
    return {"HOME": found.pw_dir, "USER": user, "LOGNAME": user}


def start(
    user: str,
    line: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: Path,
    output: IO[bytes],
    inherits: Sequence[int] = (),
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Starts what ``argv`` returned.

    Returns:
        The process, and the socket that holds the command: to be closed to end it.

    Raises:
        OSError: as ``subprocess.Popen``.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            line,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            stdin=theirs.fileno(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **identity(user),
        )
    told = json.dumps(dict(env)).encode()
    # One that has ended, because sudo refused, takes nothing; its output says why.
    with suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(ours, [f"{len(told):0{_LENGTH}x}".encode()], list(inherits))
        ours.sendall(told)
    return process, ours


def run(
    user: str,
    python: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    given: str = "",
    timeout_s: float,
    bound: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, or for so long; raises as ``subprocess.run``.

    Args:
        user, python, command, env, given, timeout_s: those.
        bound: whether it is to end, too, with all that it has started, when this process is killed
            or stands still. Then the user may be empty, for the one that this process runs as.
    """
    if bound:
        return _run_bound(user, python, command, env, given, timeout_s)
    told = json.dumps(dict(env))
    by_sudo = os.geteuid() != 0
    # It ends itself: sudo is root's, and may not be killed; and this process may be, meanwhile.
    command = ["timeout", "--signal=KILL", f"{math.ceil(timeout_s) + 1}", *command]
    process = subprocess.Popen(
        argv(user, python, command, "--once") if by_sudo else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={"PATH": os.environ.get("PATH", os.defpath)} if by_sudo else env,
        cwd="/",
        text=True,
        errors="replace",
        start_new_session=True,
        umask=UMASK,  # which Slurm takes over into the job
        **identity(user),
    )
    told = f"{len(told.encode()):0{_LENGTH}x}{told}{given}" if by_sudo else given
    try:
        said, errors = process.communicate(told, timeout_s)
    except BaseException:
        # Not subprocess.run, which waits for its end.
        with suppress(PermissionError, ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)  # what timeout has started, too
            process.wait(timeout_s)
        for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
            pipe.close()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


def _run_bound(
    user: str,
    python: str,
    command: Sequence[str],
    env: Mapping[str, str],
    given: str,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    told = json.dumps({"env": dict(env), "given": given, "limit_s": timeout_s + 1}).encode()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            argv(user, python, command, "--bound"),
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd="/",
            text=True,
            errors="replace",
            start_new_session=True,
        )
        theirs.close()
        try:
            ours.settimeout(timeout_s)  # a sudo that hangs takes nothing
            with suppress(BrokenPipeError, ConnectionResetError):  # or one that has refused
                ours.sendall(f"{len(told):0{_LENGTH}x}".encode() + told)
            said, errors = process.communicate(timeout=timeout_s)
        except BaseException as error:
            ours.close()  # which ends the command
            with suppress(PermissionError, ProcessLookupError, subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
                # It is sudo's: root's, which may not be killed, or that of one that has ended.
            for pipe in filter(None, (process.stdout, process.stderr)):
                pipe.close()
            if isinstance(error, TimeoutError):
                raise subprocess.TimeoutExpired(process.args, timeout_s) from None
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)


def _sudo() -> str:
    return shutil.which("sudo") or "/usr/bin/sudo"


# --- as the user ------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    how = words[0] if words[0] in ("--once", "--bound") else ""
    user, *command = words[1:] if how else words
    here = how == "--bound" and (not user or os.geteuid() == 0)
    if not here and pwd.getpwnam(user).pw_uid != os.geteuid():
        print(f"this runs as user id {os.geteuid()}, and not as {user}", file=sys.stderr)
        return _REFUSED
    if user:
        os.umask(UMASK)
    if how:
        told = json.loads(_exactly(int(_exactly(_LENGTH), 16)))
        if how == "--bound":
            return _bind(command, identity(user) if user else {}, **told)
        os.execvpe(command[0], command, told)
    holder = socket.socket(fileno=os.dup(0))
    length, descriptors, _, _ = socket.recv_fds(holder, _LENGTH, _MOST_DESCRIPTORS)
    if len(length) < _LENGTH:
        return _REFUSED  # whoever started this has ended
    env = json.loads(_received(holder, int(length, 16)))
    if blocked := _closed_above(Path.cwd()):
        said = f"user {user} cannot go into {blocked}. Let others go into it (chmod o+x), or move "
        print(f"{said}the workspace ([ddl] workspace) to where that user can.", file=sys.stderr)
        return _REFUSED
    child = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        preexec_fn=_in_child,  # safe: this process has one thread
    )
    return _hold(child, holder, env)


def _bind(
    command: Sequence[str],
    whose: Mapping[str, Any],
    env: dict[str, str],
    given: str,
    limit_s: float,
) -> int:
    script = os.memfd_create("given")
    with open(script, "wb", closefd=False) as file:
        file.write(given.encode())
    os.lseek(script, 0, os.SEEK_SET)
    try:
        child = subprocess.Popen(
            command,
            env=env,
            stdin=script,
            start_new_session=True,
            preexec_fn=_in_child,  # safe: this process has one thread
            **whose,
        )
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return _REFUSED
    ended = os.pidfd_open(child.pid)
    ready, _, _ = select.select([ended, 0], [], [], limit_s)
    if ended not in ready:
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _hold(child: subprocess.Popen[bytes], holder: socket.socket, env: Mapping[str, str]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: holder.shutdown(socket.SHUT_RD))
    ended = os.pidfd_open(child.pid)
    ready, _, _ = select.select([ended, holder.fileno()], [], [])
    if ended not in ready:
        child.terminate()
        select.select([ended], [], [], _GRACE_S)
        _kill(child, env)
    code = child.wait()
    return code if code >= 0 else 128 - code


def _kill(child: subprocess.Popen[bytes], env: Mapping[str, str]) -> None:
    child.kill()
    if "DDL_RECORD_DIR" in env:
        program = str(Path(__file__).with_name("processes.py"))
        words = [sys.executable, "-SE", program, "DDL_RECORD_DIR", env["DDL_RECORD_DIR"]]
        subprocess.run(words, env={}, check=True)


def _in_child() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _closed_above(folder: Path) -> Path | None:
    """The first folder on the way to this one that this process cannot enter."""
    above = [*reversed(folder.parents), folder]
    return next((one for one in above if not os.access(one, os.X_OK)), None)


def _exactly(count: int) -> bytes:
    """Bytes of the standard input, and none after them: those are the command's."""
    got = b""
    while len(got) < count:
        chunk = os.read(0, count - len(got))
        if not chunk:
            raise EOFError("the environment is cut off")
        got += chunk
    return got


def _received(holder: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        chunk = holder.recv(min(count - len(got), 1 << 16))
        if not chunk:
            raise EOFError("the environment is cut off")
        got += chunk
    return got


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

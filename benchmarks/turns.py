"""Jobs that live side by side and work in turns, so that one run can compare them.

Who is not at turn is stopped (SIGSTOP), with all its threads: some peers have one that never rests,
and it must not take a core from the job that is measured. Only the standard library, because ranks
run this in the environments of all peers.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_SOCKET = "BENCH_SOCKET"
_PR_SET_PDEATHSIG = 1
_START_S = 300.0
_ANSWER_S = 120.0
_END_S = 20.0


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, also while it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Job:
    """Processes that together are one peer, each of which calls serve().

    A with statement starts `commands` and ends them. `ranks` processes must call, which may be
    children of those. Raises RuntimeError, naming job and rank, if a rank does not come, ends or
    does not answer within `answer_s` seconds.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        ranks: int,
        environ: Sequence[Mapping[str, str]],
        answer_s: float = _ANSWER_S,
    ) -> None:
        self.name = name
        self._answer_s = answer_s
        self.greetings: list[dict[str, Any]] = []  # what each rank said of itself
        self._commands = list(zip(commands, environ, strict=True))
        self._ranks = ranks
        self._pids: list[int] = []
        self._files: list[Any] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Job:
        self._folder = tempfile.TemporaryDirectory()
        self._listener = socket.socket(socket.AF_UNIX)
        path = str(Path(self._folder.name) / "socket")
        self._listener.bind(path)
        self._listener.listen(self._ranks)
        for command, extra in self._commands:
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=os.environ | dict(extra) | {_SOCKET: path},
                    stdin=subprocess.DEVNULL,
                    preexec_fn=die_with_parent,
                )
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGCONT)
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()  # a rank that reads the end of its requests leaves
        end = time.monotonic() + (_END_S if error is None else 1)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            if process.poll() is None:
                process.kill()
                process.wait()
        self._listener.close()
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Waits for all ranks to call serve(), and stops them."""
        connections: dict[int, Any] = {}
        end = time.monotonic() + _START_S
        while len(connections) < self._ranks:
            self._listener.settimeout(0.5)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                failed = [p.returncode for p in self._processes if p.poll() is not None]
                if failed or time.monotonic() > end:
                    why = f"exit status {failed[0]}" if failed else f"not within {_START_S:.0f} s"
                    raise RuntimeError(
                        f"{self.name}: {len(connections)} of {self._ranks} ranks started ({why}). "
                        "See their messages above."
                    ) from None
                continue
            connection.settimeout(self._answer_s)
            file = connection.makefile("rw")
            connection.close()  # the file keeps it open
            greeting = json.loads(file.readline())
            connections[greeting["rank"]] = file
            self._pids.append(greeting["pid"])
            self.greetings.append(greeting)
        self._files = [connections[rank] for rank in range(self._ranks)]
        self._signal(signal.SIGSTOP)

    def ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Lets the ranks work on `request`, and returns their answers."""
        self._signal(signal.SIGCONT)
        for file in self._files:
            file.write(json.dumps(request) + "\n")
            file.flush()
        answers = []
        for rank, file in enumerate(self._files):
            try:
                line = file.readline()
            except TimeoutError:
                line = ""
            if not line:
                raise RuntimeError(
                    f"{self.name}: rank {rank} gave no answer to {request}. See its messages above."
                )
            answers.append(json.loads(line))
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@contextlib.contextmanager
def started(jobs: Sequence[Job]) -> Iterator[None]:
    """All of `jobs` ready and stopped; ended at the end, also by SIGTERM."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        for job in jobs:
            stack.enter_context(job)
        for job in jobs:
            job.wait_until_ready()
        yield


def mpirun(python: Path, ranks: int) -> list[str]:
    """The start of a command for `ranks` ranks with the Open MPI of `python`'s environment."""
    placement = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    return [str(python.parent / "mpirun"), "-np", str(ranks), *placement]


MPI_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def serve(
    rank: int, versions: dict[str, str], answer: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    """In a rank: gives answer(request) to each request until there are no more."""
    die_with_parent()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[_SOCKET])
        with connection.makefile("rw") as file:
            file.write(json.dumps({"rank": rank, "pid": os.getpid(), "versions": versions}) + "\n")
            file.flush()
            for line in file:
                file.write(json.dumps(answer(json.loads(line))) + "\n")
                file.flush()

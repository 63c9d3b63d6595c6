"""Runs ranks for a person who looks on: what they print, line by line, until all have ended.

Each rank shim (``ddl_ops.rank``) asks here for the standard streams of its script, at the socket
that DDL_OUTPUT names. A rank that is alone gets those of this process, so a debugger works as it
does without mpirun. Of several ranks each gets pipes of its own; what comes out of them is passed
on in whole lines with the rank in front. Rank 0 has this process's standard input.

Ranks on other hosts cannot ask. Theirs comes through mpirun, which marks each line.

What mpirun itself says is kept apart: it matters only where no rank says why the job failed.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import select
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO

from ddl_airflow.core.errors import LaunchError
from ddl_airflow.core.job import JobHandle
from ddl_airflow.launchers.base import END_S, GRACE_S
from ddl_airflow.launchers.processes import kill_marked
from ddl_airflow.launchers.records import over_since
from ddl_airflow.launchers.tether import tethered

_MARK = "DDL_RECORD_DIR"
_CHUNK = 1 << 16
# Of a line. What is longer is data, and is cut.
_LONGEST = 1 << 20
_LOOK_S = 0.05
_ASKED_S = 5.0
_ASK_S = 1.0
_OVER_S = 5.0
_KILLED_S = 2.0
_DRAIN_S = 1.0
# Of what mpirun says.
_LAST_CHUNKS = 32
# What a rank has printed, as mpirun marks it. Source: prterun(1), --output rank.
_MARKED = re.compile(rb"\[(\d+)\]<std(out|err)>: ")
# Process, user and group. Source: unix(7), SO_PEERCRED.
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Ended:
    """How what held the ranks together ended.

    Attributes:
        exit_code: its own, 128 + signal for a signal.
        said: what it said itself, and no rank; the last of it.
        signal: that this process got, and ended the job for; SIGPIPE if nobody reads the output any
            more; 0 for none.
        left: a few words on each process that could not be ended.
    """

    exit_code: int
    said: str
    signal: int
    left: tuple[str, ...]


class _Again(Exception):
    """A second signal: whoever sends it does not want to wait."""


def open_standard_streams() -> None:
    """Gives a stream that the caller has closed to the null device.

    To be called first: what is opened later would take its place.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)


def run(
    argv: Sequence[str],
    environ: Mapping[str, str],
    ranks: int,
    folder: Path,
    *,
    relayed: bool = False,
    files: OutputFiles | None = None,
    asks: Callable[[], bool] = lambda: False,
) -> Ended:
    """Runs mpirun, or what starts the tasks of a cluster, to its end. No process is left then.

    The signals of ``ending_signals`` end the job, after 3 s with SIGKILL; a second one ends it at
    once. If nobody reads the output any more, that ends it too; and a rank that cannot end is not
    waited for when those here say that the job has long been over.

    Args:
        argv: the command.
        environ: its environment; DDL_RECORD_DIR in it is the job's own, and marks its processes.
        ranks: how many there are.
        folder: where it runs.
        relayed: whether what ranks print comes through mpirun; DDL_OUTPUT in ``environ`` says so to
            them.
        files: what ranks print goes there as well.
        asks: whether ranks are to be asked to make room, by SIGURG: once a second from then on.

    Raises:
        OSError: it cannot be started, or the output cannot be written.
    """
    return _Job(environ, ranks, folder, relayed, files, asks).run(argv)


class OutputFiles:
    """What each rank prints, in ``rank.<number>/stdout`` and ``stderr`` of a folder.

    A file begins empty; of a job that starts again it has all starts.

    Args:
        folder: made when it is needed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[tuple[int, int], IO[bytes]] = {}

    def add(self, rank: int, ranks: int, to: int, chunk: bytes) -> None:
        """Adds what one of so many ranks has printed, to stream 1 or 2. Raises OSError."""
        file = self._open.get((rank, to))
        if file is None:
            # As wide as the largest number: a listing has them in their order.
            own = self._folder / f"rank.{rank:0{len(str(ranks - 1))}}"
            own.mkdir(parents=True, exist_ok=True)
            file = (own / ("stdout" if to == 1 else "stderr")).open("wb", buffering=0)
            self._open[rank, to] = file
        file.write(chunk)

    def close(self) -> None:
        """Closes all."""
        for file in self._open.values():
            file.close()


class Lines:
    """The output of a rank on its way: whole lines, each with the rank in front.

    A carriage return ends a line as well: a progress bar goes back to its start, to be drawn anew.

    Args:
        prefix: what stands in front of each.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix.encode()
        self._rest = b""

    def take(self, chunk: bytes) -> bytes:
        """The lines that are whole with what has arrived; an empty chunk is the end."""
        text, held = self._rest + chunk, b""
        if b"\r" in text:
            if chunk and text.endswith(b"\r"):
                text, held = text[:-1], b"\r"  # the rest of a line end may follow
            text = re.sub(rb"(?m)^\r+(?!\r*\n)", b"", text)  # a bar begins with it: no empty line
            text = re.sub(rb"\r+\n?", b"\n", text)
        end = text.rfind(b"\n") + 1
        whole, self._rest = text[:end], text[end:] + held
        if self._rest and (not chunk or len(self._rest) > _LONGEST):
            whole, self._rest = whole + self._rest + b"\n", b""
        if not whole:
            return b""
        return self._prefix + whole[:-1].replace(b"\n", b"\n" + self._prefix) + b"\n"


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals that end a job: a closed terminal's too, unless nohup has it ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


class _Job:
    def __init__(
        self,
        environ: Mapping[str, str],
        ranks: int,
        folder: Path,
        relayed: bool,
        files: OutputFiles | None,
        asks: Callable[[], bool],
    ) -> None:
        self._environ = environ
        self._files = files
        self._asks = asks
        self._next_ask = 0.0
        self._next_over = 0.0
        self._ranks = ranks
        self._folder = folder
        self._relayed = relayed
        self._rest = b""
        self._look = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._said: deque[bytes] = deque(maxlen=_LAST_CHUNKS)
        self._signal = 0
        self._until = math.inf

    def run(self, argv: Sequence[str]) -> Ended:
        handlers = {n: signal.signal(n, self._signalled) for n in ending_signals()}
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                address = f"ddl-run-{os.getpid()}-{secrets.token_hex(16)}"
                listener.bind(f"\0{address}")  # no file: it is gone when this process is
                listener.listen(self._ranks)
                self._look.register(listener, selectors.EVENT_READ, self._answer)
                try:
                    with suppress(_Again):
                        self._start(argv, address)
                        self._follow()
                finally:
                    for number in handlers:
                        signal.signal(number, signal.SIG_IGN)  # nothing is left to hurry
                    left = kill_marked(_MARK, self._environ[_MARK], _KILLED_S)
                self._look.unregister(listener)
            self._drain()
        finally:
            self._look.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        code = -(self._signal or signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # of one that cannot end: it is among `left`
            code = self._process.wait(_KILLED_S) if self._process else code
        said = b"".join(self._said).decode("utf-8", "replace").replace("\0", "")
        return Ended(code if code >= 0 else 128 - code, said, self._signal, tuple(left))

    def _start(self, argv: Sequence[str], address: str) -> None:
        self._process = subprocess.Popen(
            tethered(argv),
            cwd=self._folder,
            env={**self._environ, **({} if self._relayed else {"DDL_OUTPUT": address})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # a terminal's Ctrl-C is for this process, to pass on
        )
        assert self._process.stdout is not None
        take = self._sort if self._relayed else self._said.append
        self._look.register(self._process.stdout, selectors.EVENT_READ, take)
        if self._signal:  # it came before there was anything to end
            self._process.terminate()

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if self._signal:
            raise _Again
        self._end(number)

    def _end(self, number: int) -> None:
        self._signal = number
        self._until = time.monotonic() + GRACE_S
        if self._process is not None:
            self._process.terminate()

    def _follow(self) -> None:
        assert self._process is not None
        while self._process.poll() is None and time.monotonic() < self._until:
            self._read(_LOOK_S)
            if time.monotonic() >= self._next_ask and self._asks():
                self._process.send_signal(signal.SIGURG)
                self._next_ask = time.monotonic() + _ASK_S
            if self._long_over():
                return

    def _long_over(self) -> bool:
        if time.monotonic() < self._next_over:
            return False
        self._next_over = time.monotonic() + _OVER_S
        records = Path(self._environ[_MARK])
        with suppress(LaunchError):  # of a record that is none: said at the end
            since = over_since(JobHandle("local", "ddl-run", 0, self._ranks, records, records))
            return since is not None and time.time() - since > END_S
        return False

    def _drain(self) -> None:
        """What the ranks had printed when they ended."""
        until = time.monotonic() + _DRAIN_S  # somebody who has left the job may print for ever
        while self._read(0) and time.monotonic() < until:
            continue
        for key in list(self._look.get_map().values()):
            self._end_of(key)

    def _read(self, wait_s: float) -> bool:
        """Deals with what has come; whether there was anything."""
        ready = self._look.select(wait_s)
        for key, _ in ready:
            if isinstance(key.fileobj, socket.socket):
                key.data(key.fileobj)
            elif chunk := os.read(key.fd, _CHUNK):
                key.data(chunk)
            else:
                self._end_of(key)
        return bool(ready)

    def _end_of(self, key: selectors.SelectorKey) -> None:
        self._look.unregister(key.fileobj)
        key.data(b"")
        if self._process is None or key.fileobj is not self._process.stdout:
            os.close(key.fd)

    def _answer(self, listener: socket.socket) -> None:
        """Gives a rank the streams of its script."""
        asking, _ = listener.accept()
        with asking, ExitStack() as given:
            asking.settimeout(_ASKED_S)
            said = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(said)[1] != os.geteuid():
                return  # abstract addresses are open to all users of the host
            ours, theirs = zip(*(os.pipe() for _ in range(2)), strict=True)
            null = os.open(os.devnull, os.O_RDONLY)
            for descriptor in (null, *theirs):
                given.callback(os.close, descriptor)
            try:
                rank, _, task = asking.recv(_CHUNK).decode().partition(" ")
                alone = self._ranks == 1 and self._files is None
                mine = [0, 1, 2] if alone else [null if int(rank) else 0, *theirs]
                socket.send_fds(asking, [b"."], mine)
            except (OSError, ValueError):  # it was ended meanwhile; its record tells
                alone = True
            if alone:
                for descriptor in ours:
                    os.close(descriptor)
                return
        for descriptor, to in zip(ours, (1, 2), strict=True):
            take = partial(self._take, Lines(f"[{task or f'rank {rank}'}] "), to, int(rank))
            self._look.register(descriptor, selectors.EVENT_READ, take)

    def _take(self, lines: Lines, to: int, rank: int, chunk: bytes) -> None:
        """What a rank has printed."""
        if self._files is not None and chunk:
            try:
                self._files.add(rank, self._ranks, to, chunk)
            except OSError as error:
                raise _unwritable(error) from error
        self._pass_on(lines, to, chunk)

    def _sort(self, chunk: bytes) -> None:
        """Passes on what mpirun has marked as a rank's, in whole lines; the rest is its own."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._rest and (not chunk or len(self._rest) > _LONGEST):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            if found := _MARKED.match(line):
                rank = int(found[1])
                to = 1 if found[2] == b"out" else 2
                self._take(Lines(f"[rank {rank}] "), to, rank, line[found.end() :] + b"\n")
            else:
                self._said.append(line + b"\n")

    def _pass_on(self, lines: Lines, to: int, chunk: bytes) -> None:
        text = memoryview(lines.take(chunk))
        while text and self._signal != signal.SIGPIPE:
            try:
                if not self._takes_more(to):
                    return
                # No more than is written at once: the rest could wait for a reader for ever.
                text = text[os.write(to, text[: select.PIPE_BUF]) :]
            except BlockingIOError:  # whoever shares it was faster
                continue
            except BrokenPipeError:
                self._end(signal.SIGPIPE)
            except OSError as error:
                raise _unwritable(error) from error

    def _takes_more(self, to: int) -> bool:
        """Waits for whoever reads the output; not if the job is to end meanwhile."""
        while not select.select([], [to], [], _LOOK_S)[1]:
            if self._signal:
                return False
        return True


def _unwritable(error: OSError) -> OSError:
    place = f"{error.filename}: " if error.filename else ""
    return OSError(error.errno, f"the output cannot be written: {place}{error.strerror}")

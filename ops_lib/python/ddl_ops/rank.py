"""One rank: run the training command, keep its output, and say on disk how it ended.

mpirun starts ``python -m ddl_ops.rank -- COMMAND`` once per rank; for a cluster of parameter
servers and workers ``ddl_airflow.launchers.tasks`` does, and says in DDL_TASK which it is. The exit
code of mpirun alone cannot be trusted to mean success (a lost host can yield 0), so each rank
leaves a record, ``$DDL_RECORD_DIR/rank-<n>.json``, and whoever started the job counts them.

The script's output goes to ``$LOG_DIR/rank-<n>.log``; with ``DDL_OUTPUT`` (``ddl-run`` by hand) to
whoever listens there, stdout and stderr apart; where that is ``-``, where mpirun sends it. Without
``DDL_RECORD_DIR`` nothing is recorded, and it goes there, too.

SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and SIGURG go to the script. SIGURG asks it to make room, if it
listens (``ddl_ops.preemption``), and nothing else happens.

To a task of a cluster SIGUSR2 is a release: its work is done though it does not end by itself, as
that of a parameter server. It is ended, and the rank has succeeded.

Standard library only, but for what asks the driver of GPUs: this runs before, and beside, whatever
the script imports.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from ddl_ops import progress
from ddl_ops.command_line import STARTUP, command_argv, is_compound, may_hide_an_exception
from ddl_ops.environment import RANK_PROCESS, SHELL, Placement, read_placement
from ddl_ops.gpu_usage import GpuUsage
from ddl_ops.metric_reader import MetricReader
from ddl_ops.rank_record import RankRecord, exception_file, settings, writes_file
from ddl_ops.resource_usage import ResourceUsage, usage_file

# As ddl_airflow.core.environment has it.
CONTRACT = 1
_NOT_EXECUTABLE = 126
# Signals that ask a script to end.
_ASKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The return code of a process that did, and of a shell whose command did.
_ENDED_BY_SIGTERM = (-signal.SIGTERM, 128 + signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.1
_LEFT_S, _LEFT_LOOK_S = 10.0, 0.005
# A script that is released, or whose mpirun has ended, and will not listen to SIGTERM is killed
# after that.
_GRACE_S = 1.5
# Of a log's end, in which its last line is looked for; and of that, given as a reason.
_LONGEST = 4096
_QUOTED = 300
# What TensorFlow built for GPUs says on a host without, whatever CUDA_VISIBLE_DEVICES is: the first
# before it reads TF_CPP_MIN_LOG_LEVEL, the second as an error.
_NO_DRIVER = re.compile(
    rb"(?m)^(?:[^\n]*cudart_stub\.cc:\d+\] Could not find cuda drivers"
    rb"|[^\n]*cuda_(?:platform|driver)\.cc:\d+\] failed call to cuInit"
    rb"|WARNING: All log messages before absl::InitializeLog\(\) is called)[^\n]*\n"
)
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def read_task(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """DDL_TASK: which task of a cluster this is; None under mpirun.

    task, rank, size, learner, nodes; and here, how many tasks share this host.
    """
    task: dict[str, Any] | None = json.loads(environ.get("DDL_TASK", "null"))
    return task


def mpirun_has_ended(environ: Mapping[str, str]) -> bool:
    """Whether the mpirun that DDL_MPIRUN names, as pid@host, has ended. Of another host: no."""
    pid, _, host = environ.get("DDL_MPIRUN", "").partition("@")
    if host != os.uname().nodename:
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"  # nobody has asked yet how it ended


def child_environment(environ: Mapping[str, str], placement: Placement) -> dict[str, str]:
    """The environment of the script: the caller's, and what only a rank can know."""
    env = dict(environ)
    for name in (RANK_PROCESS, SHELL):  # of a job around this one, in which a rank started this job
        env.pop(name, None)
    env.pop("DDL_OUTPUT", None)
    if (task := read_task(environ)) is not None:
        del env["DDL_TASK"]
        env["LEARNER_ID"] = str(task["learner"])
        if "nodes" in task:  # an earlier launcher of the same contract does not say
            env["NUM_LEARNERS"] = str(task["nodes"])
        if placement.rank != 0:
            # Each task is alone as far as `ddl` knows; the first one speaks for all.
            env.pop("DDL_PROGRESS", None)
    else:
        env.pop("DDL_MPIRUN", None)
        slots = env.get("DDL_SLOTS", "")  # of a job on one host: as if there were several
        host, hosts = placement.host, placement.num_hosts
        if slots.isdecimal():
            host, hosts = placement.rank // int(slots), -(-placement.size // int(slots))
        env["LEARNER_ID"], env["NUM_LEARNERS"] = str(host + 1), str(hosts)
    if directory := env.get("DDL_RECORD_DIR"):
        env["DDL_EXCEPTION_FILE"] = str(exception_file(Path(directory), placement.rank))
        if placement.size > 1:
            env["DDL_WRITES_FILE"] = str(writes_file(Path(directory), placement.rank))
    # `python` in a manifest means the Python of this environment, also further on in the command.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env["PYTHONPATH"] = os.pathsep.join(p for p in (STARTUP, env.get("PYTHONPATH", "")) if p)
    env.setdefault("PYTHONUNBUFFERED", "1")
    env.setdefault(_LOG_LEVEL, "1")  # warnings, not each start's remarks
    # TensorFlow takes every core for itself; ranks of one host must share them.
    threads = str(max(1, _cores() // placement.local_size))
    env.setdefault("TF_NUM_INTRAOP_THREADS", threads)
    env.setdefault("OMP_NUM_THREADS", threads)
    return env


def _cores() -> int:
    """How many cores this process may keep busy: of its affinity, and of a container's limit.

    More threads than that are held back together, each time that the limit is used up.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        groups = _OWN_CGROUPS.read_text("utf-8").splitlines()
    except OSError:
        return cores
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / "cpu" if controllers else _CGROUPS  # of version 1, and of 2
        names = [name for name in path.split("/") if name]
        for depth in range(len(names) + 1):  # a container may not see the groups above its own
            cores = min(cores, math.ceil(_limit_of(root.joinpath(*names[:depth]))))
    return cores


def _limit_of(group: Path) -> float:
    """The cores that a control group may keep busy; without a limit more than there are."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            said = " ".join((group / name).read_text("utf-8") for name in names)
            quota, period = map(int, said.split())
        except (OSError, ValueError):  # the other version, or "max"
            continue
        if quota > 0:
            return quota / period
    return sys.maxsize


def _die_with_parent() -> None:
    """In the child: a shim that is killed takes its script along."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    if os.isatty(0):
        # mpirun's children are no foreground group: a terminal of their own session would stop
        # whoever reads from it. Source: termios(3), SIGTTIN.
        os.setsid()


_LIBC = ctypes.CDLL(None, use_errno=True)


def _log_path(environ: Mapping[str, str], rank: int) -> Path:
    return Path(environ.get("LOG_DIR") or environ["DDL_RECORD_DIR"]) / f"rank-{rank}.log"


def _last_line(log: Path) -> str:
    """What a script that ends with a code of its own mostly gives as the reason."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST))
            lines = re.split(r"[\r\n]", file.read().decode("utf-8", "replace"))
    except OSError:  # the script has emptied its LOG_DIR
        return ""
    return next((line.strip()[:_QUOTED] for line in reversed(lines) if line.strip()), "")


def _given_streams(address: str, rank: int, task: str) -> list[int]:
    """Standard input, output and error for the script, of ``ddl_airflow.launchers.terminal``."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(f"\0{address}")
        asked.sendall(f"{rank} {task}".encode())
        _, descriptors, _, _ = socket.recv_fds(asked, 1, 3)
    return descriptors


def _streams(given: Sequence[int], *, logged: bool, searched: bool) -> dict[str, Any]:
    """What ``Popen`` is told of the script's streams."""
    if given and not searched:
        return {"stdin": given[0], "stdout": given[1], "stderr": given[2]}
    if given:
        return {"stdin": given[0], "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if logged else {}


def _children(pid: int) -> list[int]:
    """Of a process's first thread; empty if it has ended."""
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split())]
    except OSError:
        return []


def _below(pid: int) -> list[int]:
    """What a process has started, and what that has."""
    found = [pid]
    for one in found:  # which grows meanwhile
        found += _children(one)
    return found[1:]


def _listens(pid: int, signum: int) -> bool:
    """Whether a process has a handler for the signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("utf-8")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def _signal(child: subprocess.Popen[bytes], signum: int, *, shell: bool) -> list[int]:
    """Sends the script a signal; returns which processes below the child got it.

    Args:
        shell: the child is a shell around the script, unless it has replaced itself by that. Of
            what it runs, those are signalled that have a handler, so that a script that saves keeps
            the ``tee`` that it prints to; all, if none has.
    """
    if not shell or child.poll() is not None:  # whose number may be another's by now
        child.send_signal(signum)
        return []
    below = _below(child.pid)
    # A shell has no handler of SIGURG; what has taken its place may.
    if signum in _ASKS or (signum == signal.SIGURG and _listens(child.pid, signum)):
        child.send_signal(signum)
    told = [pid for pid in below if _listens(pid, signum)] or below
    for pid in told:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
    return told


def _take_what_has_ended(child: subprocess.Popen[bytes]) -> None:
    """Waits for processes that the script left, and that have ended; not for the child itself.

    They come to this process, and count against the limit of processes until somebody does.
    """
    with suppress(ChildProcessError):
        while how := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if how.si_pid == child.pid:
                return
            os.waitpid(how.si_pid, 0)


def _end_what_is_left() -> None:
    """Kills whatever the script started and left, also what made a session of its own."""
    foreign: set[int] = set()  # another user's, by way of sudo
    deadline = time.monotonic() + _LEFT_S
    while pids := {*_children(os.getpid())} - foreign:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                foreign.add(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # its own children come to this process now
        if time.monotonic() > deadline:
            return  # one that the kernel does not end, in a file system that is away
        time.sleep(_LEFT_LOOK_S)


def _ended_by_itself(child: subprocess.Popen[bytes]) -> bool:
    """Whether it had ended, of something else, before a signal asks it to; for a handler of those.

    ``poll`` does not say so while what the signal has interrupted waits. mpirun signals the whole
    process group, so a script may have ended as it was asked to before its shim hears of it.
    """
    if child.returncode is not None:
        return True
    try:
        how = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # ``_has_ended`` had seen its end
        return True
    if how is None:
        return False
    # A shell exits with 128 + the signal of what it has run.
    number = how.si_status - 128 if how.si_code == os.CLD_EXITED else how.si_status
    return number > 0 and number not in _ASKS


def _has_ended(child: subprocess.Popen[bytes], *, wait: bool = False) -> bool:
    """As ``poll``, or ``wait``; but a handler can tell at any moment whether the child had ended
    before its signal: the child is left to be waited for until its end is known here.
    """
    if child.returncode is not None:
        return True
    options = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
    with suppress(ChildProcessError):  # a handler that passed on a signal has waited for it
        if os.waitid(os.P_PID, child.pid, options) is None:
            return False
    child.wait()
    return True


def _keep(
    child: subprocess.Popen[bytes],
    to: Path | Sequence[int],
    definitions: Sequence[Mapping[str, str]],
    hidden: re.Pattern[bytes] | None,
    usage: ResourceUsage | None,
    over: Callable[[], bool],
) -> None:
    """Keeps the output until the script ends.

    Args:
        child: the script.
        to: the log; or a descriptor for its standard output, and one for its standard error.
        definitions: the metrics to look for.
        hidden: lines that are not kept.
        usage: looks meanwhile at what the child takes.
        over: whether the script has ended.
    """
    with ExitStack() as opened:
        if isinstance(to, Path):
            sinks: list[BinaryIO] = [opened.enter_context(to.open("ab"))]
        else:
            sinks = [opened.enter_context(open(one, "wb", closefd=False)) for one in to]
        sources = filter(None, (child.stdout, child.stderr))
        pairs = zip(sources, sinks, strict=True)
        places = {one.fileno(): (sink, MetricReader(definitions)) for one, sink in pairs}
        _pump(places, hidden, usage, over)


def _pump(
    places: Mapping[int, tuple[BinaryIO, MetricReader]],
    hidden: re.Pattern[bytes] | None,
    usage: ResourceUsage | None,
    over: Callable[[], bool],
) -> None:
    """What the child left running may hold a pipe for longer than the child lives."""
    for source in places:
        os.set_blocking(source, False)
    opened = list(places)
    while True:
        if usage is not None:
            usage.look()
        ended = over()
        # Of nothing opened, by a script that has closed its output and goes on, this is a pause.
        readable, _, _ = select.select(opened, [], [], 0 if ended else _LOOK_S)
        for source in readable:
            sink, metrics = places[source]
            chunk = os.read(source, 65536)
            if chunk:
                sink.write(hidden.sub(b"", chunk) if hidden else chunk)
                sink.flush()
                _find(metrics, chunk, sink)
            else:
                opened.remove(source)
        if ended and not readable:
            for sink, metrics in places.values():
                _find(metrics, b"", sink)
            return


def _find(metrics: MetricReader, chunk: bytes, sink: BinaryIO) -> None:
    for values in metrics.feed(chunk):
        progress.append(values, source="metrics")
    for note in metrics.notes():
        sink.write(f"ddl: {note}\n".encode())


def run(command: str | Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the command as this rank and returns its exit code, 128 + signal for a signal.

    Args:
        command: one command as text (a manifest's), or an argv (``ddl-run``'s).
        environ: the environment given by mpirun, or by ``ddl_airflow.launchers.tasks``.
    """
    placement = read_placement(environ)
    if (task := read_task(environ)) is not None:
        rank, here = int(task["rank"]), int(task["here"])
        placement = Placement(rank, int(task["size"]), rank % here, here, launched=True)
    rank = placement.rank
    directory = environ.get("DDL_RECORD_DIR")
    record = RankRecord(Path(directory) if directory else None, rank, task["task"] if task else "")
    if (theirs := environ.get("DDL_CONTRACT", str(CONTRACT))) != str(CONTRACT):
        said = (
            f"ddl-ops of {sys.executable} is of another release than ddl-airflow: process contract "
            f"{CONTRACT}, and {theirs} there. Install the same release of both"
        )
        print(f"rank {rank}: {said}", file=sys.stderr)
        record.write(ended=time.time(), exit_code=_NOT_EXECUTABLE, reason=said)
        return _NOT_EXECUTABLE
    argv = command_argv(command) if isinstance(command, str) else list(command)
    shell = isinstance(command, str) and is_compound(command)
    # A level that somebody has chosen says what they want to see.
    no_gpu = environ.get("DDL_NO_GPU") == "1" and _LOG_LEVEL not in environ
    hidden = _NO_DRIVER if no_gpu and not any(_LOG_LEVEL in word for word in argv) else None
    definitions = json.loads(environ.get("DDL_METRICS", "[]")) if rank == 0 else []
    given: list[int] = []
    address = environ.get("DDL_OUTPUT")
    if address == "-":
        given = [os.dup(number) for number in range(3)]
    elif address:
        given = _given_streams(address, rank, task["task"] if task else "")
    parent = os.getppid()
    env = child_environment(environ, placement)
    started = {"settings": settings(env)} if rank == 0 else {}
    record.write(world_size=placement.size, **started)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        child = subprocess.Popen(
            argv,
            env=env,
            **_streams(given, logged=bool(directory), searched=bool(definitions)),
            preexec_fn=_die_with_parent,  # safe: this process has one thread
        )
    except OSError as error:
        said = f"rank {rank}: cannot run {argv[0]!r}: {error.strerror}"
        print(said, file=sys.stderr)
        if directory and not given:
            _log_path(environ, rank).write_text(f"{said}\n", "utf-8")
        code = 127 if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        record.write(ended=time.time(), exit_code=code, reason=f"{argv[0]}: {error.strerror}")
        return code

    asked = released = late = False
    told: set[int] = set()  # what has been asked to end below the child

    def record_asked_to_end() -> None:
        # Say it at once: mpirun's SIGKILL may follow before the script is done with SIGTERM. What
        # it raises from the first time on is a consequence.
        nonlocal asked
        if not asked and not _ended_by_itself(child):  # else it is what the others are ended for
            asked = True
            record.write(asked_to_end=time.time())

    def forward(signum: int, _frame: FrameType | None) -> None:
        if signum not in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG):
            record_asked_to_end()
        below = _signal(child, signum, shell=shell)
        if signum in _ASKS:
            told.update(below)

    def kill_child(_signum: int, _frame: FrameType | None) -> None:
        nonlocal late
        late = True
        child.kill()

    def end_child() -> None:
        signal.signal(signal.SIGALRM, kill_child)
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S)
        told.update(_signal(child, signal.SIGTERM, shell=shell))

    def over() -> bool:
        # A shell that does not wait for what it runs, as a script of the user's for sh, ends of
        # SIGTERM at once, and a script in it may still save, or know nothing of it yet.
        if not _has_ended(child):
            return False
        if late or not asked or child.returncode not in _ENDED_BY_SIGTERM:
            return True
        saving = [pid for pid in _below(os.getpid()) if _listens(pid, signal.SIGTERM)]
        for pid in saving:
            if pid not in told:
                told.add(pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
        return not saving

    def release(_signum: int, _frame: FrameType | None) -> None:
        nonlocal released
        released = True
        record.write(released=time.time())
        end_child()

    def look_at_parent(_signum: int, _frame: FrameType | None) -> None:
        # The kernel also tells of the end of the thread that started this process.
        if os.getppid() != parent or mpirun_has_ended(environ):
            record_asked_to_end()
            end_child()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGURG):
        signal.signal(number, forward)
    signal.signal(signal.SIGCHLD, lambda *_: _take_what_has_ended(child))
    if task is None:
        # An mpirun that is killed cannot end its ranks, and theirs may notice only when they talk.
        signal.signal(signal.SIGHUP, look_at_parent)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)  # it may have ended before the kernel was asked
    # Schedulers can be told to send it as a warning (sbatch --signal): that is no release.
    signal.signal(signal.SIGUSR2, forward if task is None else release)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # see ddl_airflow.launchers.tasks

    if child.stdout is not None:
        usage = None
        if directory:
            gpu = GpuUsage(env, placement.local_rank)
            usage = ResourceUsage(usage_file(Path(directory), rank), child.pid, gpu)
        try:
            to = given[1:] or _log_path(environ, rank)
            _keep(child, to, definitions, hidden, usage, over)
        except OSError as error:  # the log's disk is full: the script must not run on unseen
            child.kill()
            place = "output" if given else _log_path(environ, rank)
            record.write(ended=time.time(), exit_code=1, reason=f"{place}: {error.strerror}")
            raise
    for descriptor in given:
        os.close(descriptor)
    _has_ended(child, wait=True)
    code = child.wait()
    while not over():
        time.sleep(_LOOK_S)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # what is left is waited for where it is ended
    if code < 0:
        code = 128 - code
    if code == 0 and isinstance(command, str):
        # As of `python train.py | tee log && cp log …`, or without bash.
        code = int(may_hide_an_exception(command, argv) and record.has_exception())
    ended: dict[str, object] = {"ended": time.time(), "exit_code": code}
    logged = directory and not given
    if 0 < code < 128 and logged:
        last, earlier = _last_line(_log_path(environ, rank)), record.earlier_exception()
        reasons = [f"its last line: {last}"] if last else []
        reasons += [f"an earlier Python ended with {earlier}"] if earlier else []
        if reasons:
            ended["reason"] = "; ".join(reasons)
    # First: what is left may be another user's, or not end.
    record.write(**ended)
    _end_what_is_left()
    return 0 if released else code


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddl_ops.rank", description=__doc__)
    parser.add_argument("--command", help="one command, as a manifest writes it")
    parser.add_argument("argv", nargs="*", help="a command as separate words, after --")
    options = parser.parse_args(argv)
    if bool(options.command) == bool(options.argv):
        parser.error("give either --command TEXT or -- WORD ...")
    return run(options.command or options.argv, os.environ)


if __name__ == "__main__":
    sys.exit(main())

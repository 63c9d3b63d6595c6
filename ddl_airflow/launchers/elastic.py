"""Which hosts an elastic job has in each of its starts.

A script with an elastic state of Horovod's goes on from its last commit whenever its job starts. So
where ranks are lost the job starts again: on the hosts that are well then, but for those on which a
rank has failed, if the others suffice.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddl_airflow.core.checkpoint_names import CHECKPOINT, EVENTS, LEFT_OUT
from ddl_airflow.core.errors import SettingInvalid, SubmitFailed
from ddl_airflow.core.hosts import Host, parse_host
from ddl_airflow.core.layout import make_workspace

_LOOK_S = 5.0
_SCRIPT_S = 60.0
# Exit codes of a shell: the command is no program or not there; the line is none of its language.
_NOT_STARTED = (126, 127)
_MISUSED = 2
# Known to horovod.common.commit_lock of ddl-ops, too.
_LOCK = ".horovod-lock"
_COMMIT = ".commit"
# Each start may write such ones, also if it gets no further.
_LOG = re.compile(rf"{re.escape(EVENTS)}.*|.*\.(?:log|txt|csv|jsonl?)")
# A folder that some libraries save a checkpoint as, with files of any names. Not that of a start,
# which is called by a time.
_STEP = re.compile(
    r"(?:(?:checkpoint|ckpt|epoch|iter(?:ation)?|model|preempted|step|weights)[-_=.]?)?\d{1,7}",
    re.IGNORECASE,
)
# As TensorFlow's sessions and Estimators save a step. Another name with a number may be one that is
# written over, such as resnet-50.index.
_OF_STEP = re.compile(r"model\.ckpt-\d+\.(?:index|meta|data-\d+-of-\d+)")
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# A job that was ended may take a moment to be gone.
_LOCK_S = 5.0
_LOCK_PAUSE_S = 0.1

# The hosts there are now.
Find = Callable[[], Sequence[Host]]
# Of hosts with their slots those that are not well, and why.
Look = Callable[[Mapping[str, int]], Mapping[str, str]]


@dataclass(frozen=True)
class Bounds:
    """How an elastic job starts again.

    Attributes:
        least: ranks that are enough.
        most: ranks beyond which none are started; None: as many as there are slots.
        resets: how often it may start again; None: as long as it gets further.
        wait_s: for hosts to be there, at each start.
        cooldown_s: for how long a host is left out on which a rank has failed: at first, and at
            most; doubled each time. None: for good.
    """

    least: int
    most: int | None = None
    resets: int | None = None
    wait_s: float = 600.0
    cooldown_s: tuple[float, float] | None = None


def discovered(script: str, slots: int) -> list[Host]:
    """The hosts that a script prints, a line each: ``name`` or ``name:slots``.

    Args:
        script: what a shell runs, as in Horovod.
        slots: of those that are printed without.

    Raises:
        SettingInvalid: it cannot be started.
        SubmitFailed: it failed, takes too long, or prints something else.
    """
    name = f"--host-discovery-script {script}"
    code, said, complaint = _run_by_shell(script, name)
    last = complaint.strip().rpartition("\n")[2][:300]
    if code in _NOT_STARTED or (code == _MISUSED and _run_by_shell(script, name, "-n")[0]):
        raise SettingInvalid(f"{name}: {last}")
    if code:
        raise SubmitFailed(f"{name}: exit code {code}. {last}")
    found: dict[str, int] = {}
    for line in filter(str.strip, said.split("\n")):
        try:
            host = parse_host(line)
        except ValueError as error:
            raise SubmitFailed(f"{name}: {error}") from None
        number = host.slots or slots
        if found.setdefault(host.name, number) != number:
            counts = f"{found[host.name]} and {number}"
            raise SubmitFailed(f"{name}: {host.name} is printed twice, with {counts} slots")
    return [Host(*one) for one in found.items()]


def _run_by_shell(script: str, name: str, *flags: str) -> tuple[int, str, str]:
    """Exit code, output and errors. Raises SubmitFailed if it takes too long."""
    with subprocess.Popen(
        ["/bin/sh", *flags, "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            said, complaint = process.communicate(timeout=_SCRIPT_S)
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a pipe of several, say
            if isinstance(error, subprocess.TimeoutExpired):
                raise SubmitFailed(f"{name}: it takes longer than {_SCRIPT_S:.0f} s") from None
            raise
    return process.returncode, said, complaint


class Pool:
    """The hosts of a job, from start to start.

    Args:
        bounds: of the job.
        find: the hosts there are; may raise SubmitFailed: then there are none.
        look: which of them are not well.
        say: takes sentences for a person.
    """

    def __init__(self, bounds: Bounds, find: Find, look: Look, say: Callable[[str], None]) -> None:
        self._bounds = bounds
        self._find = find
        self._look = look
        self._say = say
        self._slots: dict[str, int] = {}  # of the last start
        self._out: frozenset[str] = frozenset()  # left out of it, to rest
        self._found = False  # whether it was ever known which hosts there are
        self._failures: dict[str, list[float]] = {}  # when, by host
        self._said: set[str] = set()

    def choose(self) -> dict[str, int]:
        """Ranks on each host of the next start; waits for hosts if there are too few.

        Raises:
            SettingInvalid: what names hosts cannot be started, and never was.
            SubmitFailed: too few were well, all the time that may be waited.
        """
        until = time.monotonic() + self._bounds.wait_s
        self._said.clear()
        while True:
            why = ""
            try:
                slots = {host.name: host.slots or 1 for host in self._find()}
            except (SubmitFailed, SettingInvalid) as error:
                # What could be started before is being replaced.
                if isinstance(error, SettingInvalid) and not self._found:
                    raise
                slots, why = {}, f"{str(error).rstrip('.')}."
            else:
                self._found = True
            wrong = self._look(slots) if slots else {}
            well = {name: number for name, number in slots.items() if name not in wrong}
            for name, what in wrong.items():
                self._say_once(f"{name} is left out: {what}.")
            rested = {name: number for name, number in well.items() if not self._rests(name)}
            for some in (rested, well):
                if sum(some.values()) < self._bounds.least:
                    continue
                for name in well.keys() - some.keys():
                    self._say_once(f"{name} is left out: a rank has failed there.")
                self._out = frozenset(well.keys() - some.keys())
                self._slots = self._filled(some)
                return dict(self._slots)
            total = sum(well.values())
            few = f"{self._bounds.least} ranks are needed at least, and there are {total} slots."
            if time.monotonic() >= until:
                told = [why, *(f"{name}: {what}." for name, what in wrong.items())]
                raise SubmitFailed(" ".join(filter(None, (few, *told))))
            self._say_once(f"{few} {f'{why} ' if why else ''}Waiting for hosts.")
            time.sleep(min(_LOOK_S, max(until - time.monotonic(), 0.0)))

    def failed_on(self, rank: int) -> None:
        """A rank of the last start has failed by itself: its host rests, if others suffice."""
        for name, number in self._slots.items():
            if rank < number:
                self._failures.setdefault(name, []).append(time.monotonic())
                return
            rank -= number

    @contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """Tells whether the next start would have other ranks, for hosts have come or gone."""
        changed, over = threading.Event(), threading.Event()

        def watch() -> None:
            while not over.wait(_LOOK_S):
                if self._would_change():
                    changed.set()
                    return

        thread = threading.Thread(target=watch, name="ddl-hosts", daemon=True)
        thread.start()
        try:
            yield changed.is_set
        finally:
            over.set()

    def _would_change(self) -> bool:
        try:
            slots = {host.name: host.slots or 1 for host in self._find()}
        except (SubmitFailed, SettingInvalid):
            return False  # nothing is known; the ranks go on
        self._out &= slots.keys()  # one that comes back later is looked at again
        there = {name: number for name, number in slots.items() if name not in self._out}
        new = {name: number for name, number in there.items() if name not in self._slots}
        # By themselves at first: whoever is at work is not asked again and again for one that is
        # there and not well.
        for asked in (new, slots):
            if not new or not self._differ(there):
                break
            wrong = self._look(asked).keys() & new.keys()
            there = {name: number for name, number in there.items() if name not in wrong}
        return self._differ(there)

    def _differ(self, slots: Mapping[str, int]) -> bool:
        """Whether others would be started on these; not on fewer than are needed: that waits."""
        return sum(slots.values()) >= self._bounds.least and self._filled(slots) != self._slots

    def _filled(self, slots: Mapping[str, int]) -> dict[str, int]:
        """Those of the last start first, so that nothing moves without need."""
        before = [name for name in self._slots if name in slots]
        left = self._bounds.most or sum(slots.values())
        taken = {}
        for name in [*before, *(name for name in slots if name not in before)]:
            if left:
                taken[name] = min(slots[name], left)
                left -= taken[name]
        return taken

    def _rests(self, name: str) -> bool:
        failures = self._failures.get(name)
        if failures is None:
            return False
        if self._bounds.cooldown_s is None:
            return True
        first, most = self._bounds.cooldown_s
        rests_s = min(first * 2.0 ** (len(failures) - 1), most)
        return time.monotonic() - failures[-1] < rests_s

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)


class Commits:
    """Where ranks commit, in all starts of one call.

    Attributes:
        folder: that.
        environment: of the ranks.
        done: whether what is in it is needed no longer.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.done = False

    def state(self) -> set[tuple[str, int]]:
        """Has more than before when something was committed, or a checkpoint saved: files.

        A step that TensorFlow saves again is no more: its sessions save the one they begin with.
        """
        found = set()
        for place, _, names in os.walk(self.folder):
            of_tensorflow = any(name.endswith(".index") for name in names)
            for name in names:
                path = Path(place, name)
                if not _is_progress(path.relative_to(self.folder).as_posix()):
                    continue
                if name == "checkpoint" and of_tensorflow:  # names the others
                    continue
                with suppress(OSError):  # an older one, which is removed just now
                    written = path.stat().st_mtime_ns
                    found.add((str(path), 0 if _OF_STEP.fullmatch(name) else written))
        return found


def _is_progress(key: str) -> bool:
    """Whether a file in a folder of commits is a commit, or may be one of a checkpoint's."""
    *folders, name = key.split("/")
    if LEFT_OUT.fullmatch(key) or _LOG.fullmatch(name):
        return False
    if any(map(_STEP.fullmatch, folders)):
        return True
    return name.endswith(_COMMIT) or CHECKPOINT.fullmatch(name) is not None


@contextmanager
def commit_folder(beneath: Path, say: Callable[[str], None]) -> Iterator[Commits]:
    """CHECKPOINT_DIR if the caller has set it; else a folder of this call, which goes with it.

    It stays if the training has not come to its end, and it is said how to go on from it. No other
    job can commit there meanwhile.

    Args:
        beneath: in which that folder is made.
        say: takes a sentence for a person.

    Raises SettingInvalid if another job commits there.
    """
    if given := os.environ.get("CHECKPOINT_DIR"):
        folder = Path(given).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        told = {"CHECKPOINT_DIR": str(folder), "DDL_COMMIT_LOCK": str(folder)}
        with _locked(folder, say):
            yield Commits(folder, told)
        return
    make_workspace(beneath)
    folder = Path(tempfile.mkdtemp(prefix="commits-", dir=beneath))
    commits = Commits(folder, dict.fromkeys(("DDL_COMMIT_DIR", "DDL_COMMIT_LOCK"), str(folder)))
    try:
        with _locked(folder, say):
            yield commits
    finally:
        if commits.done or not commits.state():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # other trainings have folders there
                beneath.rmdir()
        else:
            say(f"To go on from what was committed, set CHECKPOINT_DIR={folder}.")


@contextmanager
def _locked(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Has the lock that rank 0 of a job has which is not started again (horovod.common)."""
    path = folder / _LOCK
    until = time.monotonic() + _LOCK_S
    while (file := _try_lock(path, say)) is None:
        if time.monotonic() > until:
            who = ""
            with suppress(OSError):
                who = path.read_text("utf-8", "replace").strip()
            raise SettingInvalid(
                f"another job commits in {folder}: {who or path}. Give each job a CHECKPOINT_DIR "
                "of its own, or wait for its end."
            )
        time.sleep(_LOCK_PAUSE_S)
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


def _try_lock(path: Path, say: Callable[[str], None]) -> int | None:
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
                f"{path.parent}: {error.strerror}: the file system has no locks, so see to it that "
                "no other job commits there."
            )
            return file
        raise
    os.close(file)
    return None

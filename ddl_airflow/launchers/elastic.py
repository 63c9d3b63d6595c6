"""Which hosts an elastic job has in each of its starts.

A script with an elastic state of Horovod's goes on from its last commit whenever its job starts. So
where ranks are lost the job starts again: on the hosts that are well then, but for those on which a
rank has failed, if the others suffice.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ddl_airflow.core.errors import SettingInvalid, SubmitFailed
from ddl_airflow.core.hosts import Host, named_twice, parse_host
from ddl_airflow.core.layout import make_workspace

_LOOK_S = 5.0
_SCRIPT_S = 60.0

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
        script: its command line.
        slots: of those that are printed without.

    Raises:
        SettingInvalid: it cannot be started.
        SubmitFailed: it failed, takes too long, or prints something else.
    """
    name = f"--host-discovery-script {script}"
    try:
        words = shlex.split(script)
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SCRIPT_S, check=False
        )
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise SettingInvalid(f"{name}: {why}") from error
    except subprocess.TimeoutExpired:
        raise SubmitFailed(f"{name}: it takes longer than {_SCRIPT_S:.0f} s") from None
    said = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise SubmitFailed(f"{name}: exit code {done.returncode}. {last[:300]}")
    try:
        hosts = [parse_host(line) for line in said.split("\n") if line.strip()]
    except ValueError as error:
        raise SubmitFailed(f"{name}: {error}") from None
    if twice := named_twice(hosts):
        raise SubmitFailed(f"{name}: {twice} is printed twice")
    return [Host(host.name, host.slots or slots) for host in hosts]


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
        self._out: frozenset[str] = frozenset()  # left out of it
        self._failures: dict[str, list[float]] = {}  # when, by host
        self._said: set[str] = set()

    def choose(self) -> dict[str, int]:
        """Ranks on each host of the next start; waits for hosts if there are too few.

        Raises:
            SettingInvalid: what names hosts cannot be started.
            SubmitFailed: too few were well, all the time that may be waited.
        """
        until = time.monotonic() + self._bounds.wait_s
        self._said.clear()
        while True:
            why = ""
            try:
                slots = {host.name: host.slots or 1 for host in self._find()}
            except SubmitFailed as error:
                slots, why = {}, str(error)
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
                self._out = frozenset(slots.keys() - some.keys())
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
        # Fewer than are needed: the ranks go on, and the next start waits.
        return sum(there.values()) >= self._bounds.least and self._filled(there) != self._slots

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
        """Changes whenever something is committed."""
        found = set()
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # an older one, which is removed just now
                if not path.name.startswith("."):
                    found.add((path.name, path.stat().st_mtime_ns))
        return found


@contextmanager
def commit_folder(beneath: Path, say: Callable[[str], None]) -> Iterator[Commits]:
    """CHECKPOINT_DIR if the caller has set it; else a folder of this call, which goes with it.

    It stays if the training has not come to its end, and it is said how to go on from it.

    Args:
        beneath: in which that folder is made.
        say: takes a sentence for a person.
    """
    if given := os.environ.get("CHECKPOINT_DIR"):
        folder = Path(given).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        yield Commits(folder, {"CHECKPOINT_DIR": str(folder)})
        return
    make_workspace(beneath)
    commits = Commits(Path(tempfile.mkdtemp(prefix="commits-", dir=beneath)), {})
    commits.environment = {"DDL_COMMIT_DIR": str(commits.folder)}
    try:
        yield commits
    finally:
        if commits.done or not commits.state():
            shutil.rmtree(commits.folder, ignore_errors=True)
            with suppress(OSError):  # other trainings have folders there
                beneath.rmdir()
        else:
            say(f"To go on from what was committed, set CHECKPOINT_DIR={commits.folder}.")

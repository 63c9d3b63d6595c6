"""State that ranks share, save and go back to, also in the next start of the job.

Imports no framework.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import linecache
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import numpy as np
from ddl_ops import arrays, preemption
from ddl_ops.environment import PLACEMENT

from horovod.common import commit_lock
from horovod.common.commits import Commit, Commits, Place, state_of


class _Script:
    """How often run() has been given a state, in all and from each place, and how often the ranks
    have asked each other whether to end, in all starts of the job. The same on all ranks that have
    not joined."""

    states = 0
    times: ClassVar[dict[tuple[str, str, int], int]] = {}  # by function, file and line
    checks = 0
    commits: ClassVar[list[Commits]] = []  # of the states whose commits outlive the job
    known: ClassVar[set[str]] = set()  # those of which this process has looked for commits


# Of a rank that is at another step than the others.
_EQUALLY_OFTEN = (
    "Steps are calls of commit() and check_host_updates() here: call them equally often on all "
    "ranks."
)


def after_join(last: int) -> None:
    """Lets ranks go on counting alike: those that joined first have committed less. Collective.

    Args:
        last: the rank that joined last.
    """
    if PLACEMENT.size == 1 or not _Script.commits:
        return
    counts = np.array([_Script.checks, *(one.number for one in _Script.commits)], np.int64)
    arrays.broadcast([counts], last)
    _Script.checks, *numbers = map(int, counts)
    for commits, number in zip(_Script.commits, numbers, strict=True):
        commits.number = number


class State:
    """What a training is at.

    Args:
        bcast_object: gives an object of rank 0 to all ranks.
        get_rank: this rank's number.
    """

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits: Commits | None = None  # from run() on
        self._committed = False  # just now

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """To be called when a training goes on after a restart, before its function is."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The training goes on after a restart."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Nothing: the launcher tells by a signal (see docs/coming-from-horovod.md)."""
        del timestamp, update_res

    def commit(self) -> None:
        """Saves, so that restore() and a later start of the job go on from here. Collective.

        In the function of run(), and with CHECKPOINT_DIR, rank 0 writes a file, and all ranks
        return when it is on disk. Raises OSError on rank 0 if it cannot be written.
        """
        self.save()
        self._write(0, _Script.checks + 1)
        self._committed = True
        try:
            self.check_host_updates()
        finally:
            self._committed = False

    def check_host_updates(self) -> None:
        """Where all ranks commit and end by SystemExit, if any was asked to. Collective.

        Raises RuntimeError if ranks are to end and have not called it equally often.
        """
        if self._commits is None:
            return
        _Script.checks += 1
        self._listen()  # of several states, the one that is at it
        if preemption.wanted(_Script.checks, _EQUALLY_OFTEN):
            preemption.end(_Script.checks)

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            preemption.save_by(self._make_room)

    def _make_room(self, step: int, saver: int) -> None:
        # Another one than rank 0 saves where that may have joined, and not have committed.
        if not self._committed or saver != 0:
            self.save()
            self._write(saver, step)

    def _write(self, writer: int, checks: int) -> None:
        if self._commits is None:
            return
        self._commits.number += 1
        if self._rank() == writer:
            self._commits.write(self._commits.number, self._kept(checks))

    def go_on(self, func: Callable[..., Any], caller: FrameType) -> None:
        """Goes on from what an earlier start of the job has committed there. Collective.

        A state that several functions train, one after the other, commits for each apart: what the
        last one has committed is not where the first one is to go on. Where nothing was committed
        it stays as it is.

        Args:
            func: that trains it.
            caller: where that is called.

        Raises on rank 0 ValueError if that is of other variables; RuntimeError if another job
        commits in the folder; else as Commits.newest.
        """
        if not self._outlives():
            return
        _Script.states += 1
        place = _place(func, caller, self._names(), _Script.states)
        folder = os.environ.get("DDL_COMMIT_DIR") or os.environ.get("CHECKPOINT_DIR")
        if not folder:
            if self._rank() == 0 and PLACEMENT.launched:
                arrays.say(
                    "hvd.elastic: what is committed ends with the job: CHECKPOINT_DIR is not set, "
                    "as a manifest does, nor is horovodrun asked to start again by --min-np"
                )
            return
        training = os.environ.get("TRAINING_ID", "")
        commits = Commits(Path(folder), place, training)
        found, told = None, np.zeros(5, np.int64)
        if self._rank() == 0:
            # Not if who starts the job has locked it; nor in a manifest's training, whose folder is
            # its own: a rank of the try before may still hold the lock.
            locked = os.environ.get("DDL_COMMIT_LOCK")
            elsewhere = locked is None or Path(locked).resolve() != Path(folder).resolve()
            if elsewhere and "DDL_JOB_ID" not in os.environ:
                commit_lock.hold(Path(folder))
            found = commits.newest(_Script.known)
            told[:2] = commits.number, int(commits.state, 16)
        if found is not None:
            told[2:] = 1, found.checks, len(found.arrays)
        if PLACEMENT.size > 1:
            arrays.broadcast([told], 0)
        commits.number, state, again, checks, variables = map(int, told)
        commits.state = state_of(state)
        _Script.checks = max(_Script.checks, checks)
        _Script.known.add(commits.state)
        if self._commits is None:
            _Script.commits.append(commits)
        else:
            _Script.commits[_Script.commits.index(self._commits)] = commits
        self._commits = commits
        # Not at the first commit: ranks may join before theirs, and have to answer the others.
        self._listen()
        if again:
            self._prepare(variables, found)
            if found is not None:
                self._take(found)
                self.restore()
            self.sync()  # so that callbacks find on all ranks what was committed
            self.on_reset()

    def _outlives(self) -> bool:
        """Whether what save() keeps is known here: else it is for the subclass to write it."""
        return False

    def _names(self) -> tuple[str, ...]:
        """Of the attributes."""
        return ()

    def _kept(self, checks: int) -> Commit:
        """What save() keeps; for `checks` see Commit."""
        raise NotImplementedError

    def _prepare(self, variables: int, commit: Commit | None) -> None:
        """Makes variables that are not there yet, if a commit has so many. Collective.

        Args:
            variables: their number in the commit.
            commit: that, on rank 0.
        """

    def _take(self, commit: Commit) -> None:
        """Keeps what was committed, as if save() had just been called then."""
        raise NotImplementedError

    def save(self) -> None:
        """Keeps the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what save() kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks rank 0's state, and saves it. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """For subclasses."""


class ObjectState(State):
    """Attributes of plain Python objects.

    Args:
        bcast_object: see State.
        get_rank: see State.
        kwargs: the attributes, with their first values.
    """

    def __init__(
        self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved_state = copy.deepcopy(kwargs)

    def save(self) -> None:
        """Keeps copies of the attributes."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Sets the attributes to what was kept."""
        self._set_attrs()

    def sync(self) -> None:
        """Gives all ranks rank 0's, which has its own objects further on."""
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            if self._rank() != 0:
                self._set_attrs()

    def _outlives(self) -> bool:
        return True

    def _names(self) -> tuple[str, ...]:
        return tuple(sorted(self._saved_state))

    def _kept(self, checks: int) -> Commit:
        return Commit(checks, self._saved_state, ())

    def _take(self, commit: Commit) -> None:
        # The script may have been mended meanwhile: attributes are those that it has now.
        known = {name: commit.attributes.get(name, one) for name, one in self._saved_state.items()}
        self._saved_state = known

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))


def _place(
    func: Callable[..., Any], caller: FrameType, names: tuple[str, ...], ordinal: int
) -> Place:
    """Where a state is trained; counts how often one was from there."""
    file, line = caller.f_code.co_filename, caller.f_lineno
    name = getattr(func, "__qualname__", type(func).__name__)
    times = _Script.times[name, file, line] = _Script.times.get((name, file, line), 0) + 1
    try:
        source = Path(file).read_bytes()
    except OSError:
        source = b""  # of a prompt, or a notebook
    script, *words = sys.argv or [""]
    if script.endswith("kernel_launcher.py"):
        words = []  # where its front end is, another place in each start
    return Place(
        _digest(os.path.basename(script), *words),
        *(name, os.path.basename(file), line, times, names),
        hashlib.sha256(source).hexdigest(),
        _digest(linecache.getline(file, line).strip()),
        _digest(*map(os.path.abspath, (script, file))),
        ordinal,
        frozenset(_digest(one.strip()) for one in linecache.getlines(file)),
    )


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def run_fn(func: Callable[..., Any], reset: Callable[[], None] | None = None) -> Callable[..., Any]:
    """Decorates the function that trains: its first argument, a state, is the same on all ranks.

    It is that of the last commit, where the job was started again. `reset` has no effect.
    """
    del reset

    @functools.wraps(func)
    def wrapped(state: State, *args: Any, **kwargs: Any) -> Any:
        state.go_on(func, sys._getframe(1))
        state.sync()
        return func(state, *args, **kwargs)

    return wrapped

"""Waits for a scheduler's job, in place of the task that submitted it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from airflow.sdk import TaskInstanceState
from airflow.triggers.base import BaseTrigger, TriggerEvent

from ddl_airflow.airflow_internals import state_of_task
from ddl_airflow.core.cancellations import (
    Cancellation,
    cancellation_of,
    cancellations_in,
    drop_cancellation,
    keep_waiting,
    name_of,
    note_cancellation,
    say_undone,
)
from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import ConnectionInvalid, FileRefused, LaunchError
from ddl_airflow.core.job import JobHandle, JobState, JobStatus, StartedJob
from ddl_airflow.core.progress import Progress, Tail
from ddl_airflow.launchers.base import END_S, GRACE_S, Connecting, Scheduler, cancel_noted
from ddl_airflow.launchers.records import reports_of
from ddl_airflow.triggers.interval import usable
from ddl_airflow.triggers.monitor import cancelling, in_workspace, monitor_of

log = logging.getLogger(__name__)

_AGAIN_S = 2.0
# Of what a job has reported, in one look. A triggerer that starts again finds all that its jobs
# have told for days, and the threads that read it also say which of them have ended.
_MOST_TOLD = 1 << 20
# For so long what nobody has foreseen is taken for something that passes; and so is a refusal, as
# by a server whose access rules are just being changed, of what it has answered before.
_PASSES_S = 600.0
# Between two looks of a triggerer at the jobs that are still to be cancelled.
_NOTED_S = 60.0
_LOOKED: dict[Path, float] = {}  # when it looked last at each folder with notes of them
_WAITING: set[Path | None] = set()  # those that triggers here wait for, by their notes
# A workspace that hangs keeps no job from being cancelled.
_NOTING_S = 2.0
# Of a task that has ended.
_OVER = ("success", "failed", "skipped", "upstream_failed", "removed")
# Connections by their ids, and when they were looked up; for so long they are not asked for again.
_KNOWN_S = 60.0
_CONNECTIONS: dict[str, tuple[float, AirflowConnection]] = {}
_ENDING: set[asyncio.Task[None]] = set()  # the event loop keeps none


class _NotTold(LaunchError):
    """Airflow does not tell a connection: nobody has it, or what Airflow asks for it is away."""

    retryable = False


class JobTrigger(BaseTrigger):
    """Looks at a job now and then, says how it goes, and fires when it has ended.

    One question asks for the jobs of all triggers of a triggerer, at each of a scheduler's places:
    ``ddl_airflow.triggers.monitor``.

    A triggerer that starts again looks at the same job again. The scheduler's not answering is said
    and outlasted, and so is the file system's: the job goes on. So is for ten minutes what nobody
    has foreseen, for Airflow gives up the job of a trigger that raises; a connection that Airflow
    does not tell; and, once the job has been seen, be it by a triggerer before this one, whatever
    else is in the way. When a person fails, clears or deletes the task, Airflow calls ``on_kill``,
    which cancels the job; it does so from the triggerer that runs the trigger, so not while none
    runs. All that is noted until it was done: where the triggerer ends before, or none has run, a
    trigger of whatever job does it, as soon as one runs, or the cleaning.

    The triggerer must have the scheduler's commands, and see the workspace. One that has not fires
    at once, and says so; the job goes on.

    Args:
        job: a ``StartedJob``, dumped.
        interval_s: between two looks.
        timeout_s: after so many seconds from its submission the job is cancelled; None for never.
    """

    def __init__(
        self, job: dict[str, Any], interval_s: float = 5.0, timeout_s: float | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.job = job
        self.interval_s = usable(interval_s)
        self.timeout_s = timeout_s
        self._started = StartedJob.load(job)
        self._progress = Progress()
        self._noted = False
        self._seen = False
        self._failing: float | None = None  # since when it could not be seen, nor should it pass
        self._said = ""
        self._wrong = ""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        arguments = {
            "job": self.job,
            "interval_s": self.interval_s,
            "timeout_s": self.timeout_s,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields the job and its status once, at its end; or why it cannot be watched from here."""
        _WAITING.add(self._started.cancellation)
        try:
            status, late = await self._wait()
        except LaunchError as error:
            event: dict[str, Any] = {"job": self.job, "unseen": str(error)}
        else:
            event = {"job": self.job, "status": status.dump(), "timed_out": late}
        finally:
            _WAITING.discard(self._started.cancellation)
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def _wait(self) -> tuple[JobStatus, bool]:
        """The job's end, and whether it is one because it took too long."""
        reports = reports_of(self._started)
        while True:
            self._cancel_noted_now_and_then()
            status = await self._look(reports)
            waited_s = time.time() - self._started.started
            late = not status.ended and self.timeout_s is not None and waited_s > self.timeout_s
            if status.ended or late:
                break
        if late or status.is_left:  # it takes too long, or would wait for ever
            await self._cancel()
        if late:
            # Its ranks may still write: what comes after it would work beside them.
            deadline = time.monotonic() + END_S + self._started.handle.grace_s
            while not status.ended and time.monotonic() < deadline:
                status = await self._look(reports)
            status = replace(status, state=JobState.LOST)
        return status, late

    async def on_kill(self) -> None:
        """Cancels the job; Airflow gives up on it after ``[triggerer] on_kill_timeout``.

        Airflow also calls it, in a triggerer that was silent for long and wakes up, for triggers
        that others run since. Then the task is still deferred, and nothing is cancelled. Source:
        ``TriggerRunnerSupervisor.update_triggers``, Airflow 3.3.

        And it cancels the trigger anew at each of its own looks, some each second, until that has
        ended: what was begun goes on.
        """
        ending = asyncio.create_task(self._end_unless_deferred())
        _ENDING.add(ending)
        ending.add_done_callback(_ENDING.discard)
        await asyncio.shield(ending)

    async def _end_unless_deferred(self) -> None:
        if await self._still_deferred():
            self.log.info("%s goes on: another triggerer waits for it now", self._name)
            return
        noting = asyncio.ensure_future(in_workspace(note_cancellation, self._started))
        await asyncio.wait([noting], timeout=_NOTING_S)
        await self._cancel()
        self.log.info("cancelled %s", self._name)
        await noting
        await in_workspace(drop_cancellation, self._started)

    def _cancel_noted_now_and_then(self) -> None:
        """One trigger of the triggerer does it for all, beside its own job."""
        if (noted := self._started.cancellation) is None:
            return
        folder = noted.parent
        if time.monotonic() - _LOOKED.get(folder, -math.inf) < _NOTED_S:
            return
        _LOOKED[folder] = math.inf  # while it looks
        looking = asyncio.create_task(self._cancel_noted(folder))
        _ENDING.add(looking)
        looking.add_done_callback(_ENDING.discard)

    async def _cancel_noted(self, folder: Path) -> None:
        try:
            noted = await in_workspace(cancellations_in, folder)
            here = [one for one in noted if one.started.cancellation in _WAITING]
            for one in here:  # first: a scheduler may take long to answer
                await in_workspace(keep_waiting, one.started)
            for one in noted:
                if one not in here:
                    await self._cancel_one_noted(one)
        finally:
            _LOOKED[folder] = time.monotonic()

    async def _cancel_one_noted(self, one: Cancellation) -> None:
        handle = one.started.handle
        try:
            if one.task is not None and not await self._is_over(one):
                return  # its trigger, or its next try, comes to it
            # It was read before a scheduler was asked for those before it, which may take long.
            if await in_workspace(cancellation_of, one.started) != one:
                return  # nobody wants that any more
            scheduler = await _reached(handle)
            if await cancelling(handle.kind, cancel_noted, scheduler, one.started):
                self.log.info("cancelled %s, as was noted", name_of(handle))
        except Exception as error:  # of another job: it must not end this trigger
            await in_workspace(say_undone, one, _words(error), self.log)

    async def _is_over(self, one: Cancellation) -> bool:
        """Whether the task of a job has ended. One that is unknown has, if nobody waits for it: its
        run was deleted; or it was just cleared, or is of another Airflow with this workspace.
        """
        try:
            state = await state_of_task(SimpleNamespace(**(one.task or {})))
        except Exception as error:  # as of all other tasks by then
            log.debug("%s: the state of its task is not known: %s", one, error)
            return False
        return state in _OVER or (state is None and await in_workspace(lambda: one.unattended))

    async def _still_deferred(self) -> bool:
        if (task := self.task_instance) is None:
            return False
        while True:
            try:
                return await state_of_task(task) == TaskInstanceState.DEFERRED
            except Exception as error:  # Airflow does not call on_kill again where that raises
                self.log.warning(
                    "cannot cancel %s yet, for the state of its task is not known: %s",
                    *(self._name, _words(error)),
                )
            await asyncio.sleep(_AGAIN_S)

    @property
    def _name(self) -> str:
        handle = self._started.handle
        return f"{handle.kind} job {handle.number}"

    async def _cancel(self) -> None:
        handle = self._started.handle
        while True:
            try:
                scheduler = await _reached(handle)
                await cancelling(handle.kind, scheduler.cancel, handle, GRACE_S)
                return
            except Exception as error:
                self._outlast(error)
                self.log.warning("cannot cancel %s yet: %s", self._name, _words(error))
            await asyncio.sleep(_AGAIN_S)

    def _watch(self) -> None:
        if self._noted:
            return
        try:
            # As by a triggerer before this one.
            self._seen = self._started.monitored
            self._started.mark_monitored()
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise LaunchError(
                f"{error.filename}: {error.strerror}. The triggerer must see the workspace of the "
                "tasks, and write there: a file system that both share.",
                retryable=False,
            ) from error
        self._noted = True

    async def _look(self, reports: Tail | None) -> JobStatus:
        """What the scheduler says next, with what the job has reported by then."""
        handle = self._started.handle
        try:
            await in_workspace(self._watch)
            scheduler = await _reached(handle)
            told = await monitor_of(scheduler, handle).told(handle, self.interval_s)
            status = await in_workspace(scheduler.conclude, handle, told)
            self._seen, self._failing = True, None
        except Exception as error:
            self._outlast(error)
            status = JobStatus(JobState.RUNNING, reason=f"{_words(error)} Asking again.")
            await asyncio.sleep(self.interval_s)
        if not status.ended and status.reason != self._said:
            self._said = status.reason
            self.log.info("%s: %s", self._name, status.reason)
        if reports is not None:
            await in_workspace(self._follow, reports)
        return status

    def _outlast(self, error: Exception) -> None:
        """Raises LaunchError for what waiting cannot mend, or has not mended for long.

        A file system is away as a scheduler is, for a while.
        """
        if isinstance(error, OSError) or (isinstance(error, LaunchError) and error.retryable):
            return
        foreseen = isinstance(error, LaunchError)
        if foreseen and not self._seen and not isinstance(error, _NotTold):
            raise error
        now = time.monotonic()
        if self._failing is None:
            self._failing = now
            if not foreseen:
                self.log.error("%s: this should not happen", self._name, exc_info=error)
        elif now - self._failing > _PASSES_S:
            if foreseen:
                raise error
            raise LaunchError(
                f"{self._name} cannot be watched: {_words(error)}. It goes on. The triggerer's log "
                "has all of it; clear the task when that is mended.",
                retryable=False,
            ) from error

    def _follow(self, reports: Tail) -> None:
        try:
            # How many steps there are may stand in the first lines alone.
            fresh = [self._progress.feed(text) for text in reports.read(most=_MOST_TOLD)]
            reports.pass_over(_MOST_TOLD)
            fresh += [self._progress.feed(text) for text in reports.read(most=_MOST_TOLD)]
            if any(fresh):
                self.log.info("progress | %s", self._progress.line())
        except (OSError, FileRefused) as error:  # not worth a training; worth a line
            if str(error) != self._wrong:
                self._wrong = str(error)
                self.log.warning("progress.jsonl: %s", error)


def _words(error: Exception) -> str:
    known = isinstance(error, (LaunchError, OSError))
    return str(error) if known else f"{type(error).__name__}: {error}"


def _scheduler(kind: str) -> Scheduler:
    # Not at the top: a DAG that is parsed starts nothing.
    from ddl_airflow.launchers.registry import launcher

    chosen = launcher(kind, connections=_known)
    assert isinstance(chosen, Scheduler), kind
    return chosen


def _known(conn_id: str) -> AirflowConnection:
    return _CONNECTIONS[conn_id][1]


async def _reached(handle: JobHandle) -> Scheduler:
    """The scheduler of the job; the connection by which it is reached is known, from now on.

    Airflow is asked here, for it answers no thread of a triggerer but this one.
    """
    from ddl_airflow.hooks.store import connection_soon

    scheduler = _scheduler(handle.kind)
    conn_id = scheduler.connection_of(handle) if isinstance(scheduler, Connecting) else ""
    asked, _ = _CONNECTIONS.get(conn_id, (-math.inf, None))
    if conn_id and time.monotonic() - asked > _KNOWN_S:
        try:
            _CONNECTIONS[conn_id] = (time.monotonic(), await connection_soon(conn_id))
        except ConnectionInvalid as error:
            if not error.retryable:  # it is denied, from now on
                raise LaunchError(f"launcher.connection: {error}", retryable=False) from error
            # Airflow says the same of one that nobody has, and where its own API is away.
            if conn_id not in _CONNECTIONS:
                raise _NotTold(f"launcher.connection: {error}") from error
            log.warning("launcher.connection: %s What it was is used for now.", error)
            _CONNECTIONS[conn_id] = (time.monotonic(), _known(conn_id))
    return scheduler

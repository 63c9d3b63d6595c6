"""Waits for a scheduler's job, in place of the task that submitted it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from ddl_airflow.core.errors import LaunchError
from ddl_airflow.core.job import JobState, JobStatus, StartedJob
from ddl_airflow.core.progress import Progress, Tail
from ddl_airflow.launchers.base import Launcher

_GRACE_S = 3.0
_AGAIN_S = 2.0


class JobTrigger(BaseTrigger):
    """Looks at a job now and then, says how it goes, and fires when it has ended.

    A triggerer that starts again looks at the same job again. The scheduler's not answering is said
    and outlasted: the job goes on. When a person fails, clears or deletes the task, Airflow calls
    ``on_kill``, which cancels the job; it does so from the triggerer that runs the trigger, so not
    while none runs.

    The triggerer must have the scheduler's commands, and see the workspace.

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
        self.interval_s = interval_s
        self.timeout_s = timeout_s
        self._started = StartedJob.load(job)
        self._progress = Progress()
        self._said = ""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        arguments = {
            "job": self.job,
            "interval_s": self.interval_s,
            "timeout_s": self.timeout_s,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields the job and its status once, at its end."""
        await asyncio.to_thread(self._watch)
        reports = Tail(*self._started.progress) if self._started.progress else None
        while True:
            status = await asyncio.to_thread(self._look, reports)
            waited_s = time.time() - self._started.started
            late = not status.ended and self.timeout_s is not None and waited_s > self.timeout_s
            if status.ended or late:
                break
            await asyncio.sleep(self.interval_s)
        if late or status.permanent:  # it takes too long, or would wait for ever
            await self._cancel()
        if late:
            status = replace(status, state=JobState.LOST)
        event = {"job": self.job, "status": status.dump(), "timed_out": late}
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def on_kill(self) -> None:
        """Cancels the job; Airflow gives up on it after ``[triggerer] on_kill_timeout``."""
        await self._cancel()
        self.log.info("cancelled %s", self._name)

    @property
    def _name(self) -> str:
        handle = self._started.handle
        return f"{handle.kind} job {handle.number}"

    async def _cancel(self) -> None:
        handle = self._started.handle
        while True:
            try:
                await asyncio.to_thread(_launcher(handle.kind).cancel, handle, _GRACE_S)
                return
            except LaunchError as error:
                self.log.warning("cannot cancel %s yet: %s", self._name, error)
            await asyncio.sleep(_AGAIN_S)

    def _watch(self) -> None:
        try:
            self._started.watch()
        except OSError as error:
            raise LaunchError(
                f"{error.filename}: {error.strerror}. The triggerer must see the workspace of the "
                "tasks: a file system that both share."
            ) from error

    def _look(self, reports: Tail | None) -> JobStatus:
        handle = self._started.handle
        try:
            status = _launcher(handle.kind).status(handle)
        except LaunchError as error:
            status = JobStatus(JobState.RUNNING, reason=f"{error} Asking again.")
        if not status.ended and status.reason != self._said:
            self._said = status.reason
            self.log.info("%s: %s", self._name, status.reason)
        if reports is not None:
            try:
                if self._progress.feed(reports.read()):
                    self.log.info("progress | %s", self._progress.line())
            except ValueError as error:  # not worth a training; worth a line
                self.log.warning("progress.jsonl: %s", error)
        return status


def _launcher(kind: str) -> Launcher:
    # Not at the top: a DAG that is parsed starts nothing.
    from ddl_airflow.launchers.registry import launcher

    return launcher(kind)

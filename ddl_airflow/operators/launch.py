"""Runs one job of a launcher from a task: follows it, ends it, explains it."""

from __future__ import annotations

import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

from ddl_airflow.core.errors import JobFailed, JobLost
from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus
from ddl_airflow.core.progress import Progress
from ddl_airflow.launchers.base import Launcher

_POLL_S = 0.1
_SAY_EVERY_S = 2.0
_LAST_LINES = 25
_MOST_LINES = 2000
_LONGEST_LINE = 2000
# Airflow kills a task 5 s after SIGTERM; the ranks must be gone before.
_GRACE_S = 3.0


class _Tail:
    """Reads what is appended to a file from now on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read(self, *, ended: bool = False) -> str:
        """Whole lines; at the end also what has no line end."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        # A character may be cut at the end of what is there so far; take whole lines only.
        whole = len(new) if ended else new.rfind(b"\n") + 1
        self._offset += whole
        return new[:whole].decode("utf-8", "replace")


class _Echo:
    """Rank 0's output in the task's log, up to what a person reads and a browser bears."""

    def __init__(self, log: Any, path: Path) -> None:
        self._log = log
        self._path = path
        self._said = 0
        self._held: deque[str] = deque(maxlen=_LAST_LINES)
        self._passed_over = 0

    def say(self, text: str, *, ended: bool) -> None:
        for line in text.splitlines():
            if self._said < _MOST_LINES:
                self._said += 1
                self._log.info("rank 0 | %s", _short(line))
                continue
            if not self._passed_over:
                self._log.info("rank 0 says more; from here on it is in %s only", self._path)
            self._passed_over += 1
            self._held.append(line)
        if ended and self._held:
            hidden = self._passed_over - len(self._held)
            self._log.info("… %d lines are in %s; the last ones:", hidden, self._path)
            for line in self._held:
                self._log.info("rank 0 | %s", _short(line))


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"


class RunningJob:
    """One job, from submit to its end.

    Args:
        launcher: who runs it.
        log: a logger.
    """

    def __init__(self, launcher: Launcher, log: Any) -> None:
        self._launcher = launcher
        self._log = log
        self._handle: JobHandle | None = None
        self._cancelled = False
        self.progress = Progress()

    def run(self, job: JobSpec, progress_path: Path | None = None) -> None:
        """Starts the job, logs rank 0's output and a progress line, and waits for the end.

        Raises:
            SubmitFailed: nothing could be started.
            JobFailed: a rank failed; says which, where and how, with its last lines in the log.
            JobLost: the ranks are gone and none says why; or it was cancelled.
        """
        shutil.rmtree(job.record_dir, ignore_errors=True)  # a cleared task repeats its try number
        submission = self._launcher.render(job)
        self._log.info("%s", submission)
        output = _Tail(job.log_dir / "rank-0.log")
        reports = _Tail(progress_path) if progress_path else None
        before = {p: p.stat().st_size for p in job.log_dir.glob("*.log")}
        self._handle = self._launcher.submit(submission)
        try:
            status = self._follow(self._handle, output, reports)
        finally:
            # Also after an interrupt, and for what a script left behind.
            self._launcher.cancel(self._handle, _GRACE_S)
        if self._cancelled:
            raise JobLost(f"job {job.job_id} was cancelled; every process of it was ended")
        if status.state is not JobState.SUCCEEDED:
            self._explain(self._handle, status, before)

    def cancel(self) -> None:
        """Ends every process of the job. Safe before it started and after it ended."""
        self._cancelled = True
        if self._handle is not None:
            self._launcher.cancel(self._handle, _GRACE_S)

    def _follow(self, handle: JobHandle, output: _Tail, reports: _Tail | None) -> JobStatus:
        said = time.monotonic()
        fresh = False
        echo = _Echo(self._log, output.path)
        while True:
            status = self._launcher.status(handle)
            ended = status.state is not JobState.RUNNING
            echo.say(output.read(ended=ended), ended=ended)
            if reports is not None:
                try:
                    fresh |= self.progress.feed(reports.read())
                except ValueError as error:  # not worth a training; worth a line
                    self._log.warning("progress.jsonl: %s", error)
            if fresh and (ended or time.monotonic() - said >= _SAY_EVERY_S):
                self._log.info("progress | %s", self.progress.line())
                said, fresh = time.monotonic(), False
            if ended:
                return status
            time.sleep(_POLL_S)

    def _explain(self, handle: JobHandle, status: JobStatus, before: dict[Path, int]) -> None:
        failure = status.failure
        if failure is None:
            said = handle.log_dir / "launcher.log"
            self._show(said, before)
            raise JobLost(
                f"job {handle.job_id} ended and not every rank did its work, yet none failed by "
                f"itself. What its launcher said is above and in {said}"
            )
        path = self._launcher.log(handle, failure.rank)
        self._show(path, before)
        where = f" on {failure.host}" if failure.host else ""
        rank = f"rank {failure.rank} of {handle.world_size}"
        raise JobFailed(
            f"{f'{failure.task} ({rank})' if failure.task else rank}{where} {failure.reason}. "
            f"All ranks were ended. Its whole log: {path}",
            rank=failure.rank,
            host=failure.host,
            exit_code=failure.exit_code,
            retryable=not failure.permanent,
        )

    def _show(self, path: Path, before: dict[Path, int]) -> None:
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(before.get(path, 0))
            last = deque(file.read().decode("utf-8", "replace").splitlines(), _LAST_LINES)
        self._log.error("::group::last %d lines of %s", len(last), path.name)
        for line in last:
            self._log.error("%s | %s", path.stem, _short(line))
        self._log.error("::endgroup::")

"""Runs one job of a launcher for a step: follows it, ends it, explains it.

A job of a scheduler outlives the step's process. What another process needs to go on with it is in
a file of the run directory, which all processes that deal with it see anyway, since the ranks'
records are there. It is written before the job is submitted and again with the job's number, so
there is no moment at which a job runs and nothing says so. (Airflow's own ``task_state_store`` and
``ResumableJobMixin`` are of no use to a trigger, hold a worker while the job runs, and have that
moment.)
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from ddl_airflow.core.beneath import open_beneath, read_object, write_beneath
from ddl_airflow.core.cancellations import (
    Cancellation,
    cancellation_file,
    cancellation_of,
    cancellations_in,
    drop_cancellation,
    name_of,
    note_cancellation,
    say_undone,
)
from ddl_airflow.core.connections import FindConnection, own_connection
from ddl_airflow.core.errors import (
    DdlError,
    FileRefused,
    JobFailed,
    JobLost,
    JobPreempted,
    LaunchError,
    SubmitFailed,
    TrainedApart,
)
from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus, StartedJob, Submission
from ddl_airflow.core.progress import Progress, Tail
from ddl_airflow.launchers.base import (
    END_S,
    GRACE_S,
    Launcher,
    Preparing,
    Scheduler,
    cancel_noted,
)
from ddl_airflow.launchers.records import explained, reports_of, run_folder

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_ASK_S = 1.0
# As often as a trigger looks at a job, by default.
_LOOK_S = 5.0
# Of the 5 s that Airflow gives a task to end, a workspace that hangs takes no more.
_NOTING_S = 1.0
# A scheduler that hung first takes what it was asked for meanwhile.
_SOON_S = 5.0
_SAY_EVERY_S = 2.0
_LAST_LINES = 25
_LAST_BYTES = 1 << 16
_MOST_LINES = 2000
_LONGEST_LINE = 2000
# TensorFlow's own log of an error that it also raises: the line, what stands before the first such
# line of a process, and the node. Source: local_rendezvous.cc.
_SAID_AGAIN = re.compile(
    r"WARNING: All log messages before absl::InitializeLog|"
    r"[A-Z]\S* .*local_rendezvous\.cc:\d+\] Local rendezvous is aborting|\t \[\[\{\{"
)


class _Shown:
    """A rank's lines as a person needs them: without TensorFlow's trace of the graph.

    It has thirty lines before the one that says what is wrong, which the script's traceback has
    too. A line says where the rest is.

    Args:
        path: the whole log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inside = False

    def of(self, lines: Iterable[str]) -> Iterator[str]:
        """Of the lines that come next those to be shown."""
        for line in lines:
            if line.startswith("Detected at node "):
                self._inside = True
                yield f"… TensorFlow's trace of the graph is in {self._path}"
            elif self._inside and (not line.strip() or line.startswith("  ")):
                continue
            elif not _SAID_AGAIN.match(line):
                self._inside = False
                yield line


class _Echo:
    """Rank 0's output in the task's log, up to what a person reads and a browser bears."""

    def __init__(self, log: Any, path: Path) -> None:
        self._log = log
        self._path = path
        self._said = 0
        self._held: deque[str] = deque(maxlen=_LAST_LINES)
        self._passed_over = 0
        self._shown = _Shown(path)

    def say(self, text: str) -> None:
        for line in self._shown.of(text.splitlines()):
            if self._said < _MOST_LINES:
                self._said += 1
                self._log.info("rank 0 | %s", _short(line))
                continue
            if not self._passed_over:
                self._log.info("rank 0 says more; from here on it is in %s only", self._path)
            self._passed_over += 1
            self._held.append(line)

    def end(self) -> None:
        if self._held:
            hidden = self._passed_over - len(self._held)
            self._log.info("… %d lines are in %s; the last ones:", hidden, self._path)
            for line in self._held:
                self._log.info("rank 0 | %s", _short(line))


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}…"


class Supply(Protocol):
    """What a job needs while it runs."""

    def ready(self) -> bool:
        """Whether its ranks may start. Raises why they never may."""
        ...

    def check(self) -> None:
        """Raises why they are to be ended."""
        ...


class RunningJob:
    """One job, from submit to its end.

    Args:
        launcher: who runs it.
        log: a logger.
        supply: without which it does not start, and is ended; None: nothing.

    Attributes:
        images: of containers that it has run in: ``JobStatus.images``.
    """

    def __init__(self, launcher: Launcher, log: Any, supply: Supply | None = None) -> None:
        self._launcher = launcher
        self._log = log
        self._supply = supply
        self._handle: JobHandle | None = None
        self._cancelled = False
        self._said_wrong = False
        self._unread: set[str] = set()
        self.progress = Progress()
        self.images: tuple[str, ...] = ()

    def run(self, job: JobSpec, progress_path: Path | None = None) -> JobHandle:
        """Starts the job, logs rank 0's output and a progress line, and waits for the end.

        Raises:
            SubmitFailed: nothing could be started.
            JobFailed: a rank failed; says which, where and how, with its last lines in the log.
            TrainedApart: none did, and they did not train one model.
            JobLost: the ranks are gone and none says why; or it was cancelled.
            JobPreempted: it had to make room.
            DdlError: of its supply.
        """
        try:
            submission = self._prepare(job)
            self._wait(job)
            sizes, progress = _sizes(job), _end_of(progress_path)
            self._handle = self._launcher.submit(submission)
        except BaseException:  # also an interrupt
            if isinstance(self._launcher, Preparing):
                self._launcher.abandon()
            raise
        started = StartedJob(self._handle, time.time(), sizes, progress)
        survivors = ""
        try:
            status = self._follow(started)
        finally:
            # Also after an interrupt, and for what a script left behind.
            try:
                self._launcher.cancel(self._handle, GRACE_S)
            except LaunchError as error:
                survivors = str(error)
                self._log.error("%s", survivors)
        self._conclude(started, status, survivors)
        return started.handle

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Ends every process of the job. Safe before it started and after it ended."""
        self._cancelled = True
        if self._handle is not None:
            self._launcher.cancel(self._handle, GRACE_S)

    def _wait(self, job: JobSpec) -> None:
        """For as long as the job is to wait, and for its supply, unless it is cancelled."""
        deadline = time.monotonic() + job.delay_s
        while not self._cancelled:
            if (self._supply is None or self._supply.ready()) and time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)
        raise JobLost(f"job {job.job_id} was cancelled before it started")

    def _prepare(self, job: JobSpec) -> Submission:
        shutil.rmtree(job.record_dir, ignore_errors=True)  # of a deleted run of that id
        if isinstance(self._launcher, Preparing):
            job = self._launcher.prepare(job, self._log)
            if self._cancelled:  # which took its time
                raise JobLost(f"job {job.job_id} was cancelled before its ranks started")
        submission = self._launcher.render(job)
        self._log.info("%s", submission)
        return submission

    def _follow(self, started: StartedJob, known: JobStatus | None = None) -> JobStatus:
        """Says what the job says, until its end; to the end at once if that is known."""
        path = started.handle.log_dir / "rank-0.log"
        output = Tail(path, started.sizes.get("rank-0.log", 0), run_folder(started.handle))
        reports = reports_of(started)
        said = time.monotonic()
        fresh = False
        echo = _Echo(self._log, output.path)
        while True:
            status = known or self._status(started.handle)
            if self._supply is not None:  # after that: it is also why ranks have failed
                self._supply.check()
            try:
                for text in output.read(ended=status.ended):
                    echo.say(text)
            except (FileRefused, OSError) as error:
                self._say_unread(error)
            if status.ended:
                echo.end()
            if reports is not None:
                fresh |= self._report(reports, ended=status.ended)
                self._say_wrong(ended=status.ended)
            if fresh and (status.ended or time.monotonic() - said >= _SAY_EVERY_S):
                self._log.info("progress | %s", self.progress.line(ended=status.ended))
                said, fresh = time.monotonic(), False
            if status.ended:
                return status
            time.sleep(_POLL_S)

    def _status(self, handle: JobHandle) -> JobStatus:
        return self._launcher.status(handle)

    def _report(self, reports: Tail, *, ended: bool) -> bool:
        try:
            return any([self.progress.feed(text) for text in reports.read(ended=ended)])
        except (FileRefused, OSError) as error:
            self._say_unread(error)
        return False

    def _say_unread(self, error: FileRefused | OSError) -> None:
        """Once: a file that cannot be read is worth a line, and no training."""
        if str(error) not in self._unread:
            self._unread.add(str(error))
            self._log.warning("%s", error)

    def _say_wrong(self, *, ended: bool) -> None:
        """The first line that is no progress at once, and at the end how many there were."""
        wrong, first = self.progress.wrong, self.progress.first_wrong
        if wrong and not self._said_wrong:
            self._log.warning("progress.jsonl: a line is no progress and left out: %s", first)
            self._said_wrong = True
        if ended and wrong > 1:
            self._log.warning("progress.jsonl: %d lines were no progress", wrong)

    def _conclude(self, started: StartedJob, status: JobStatus, survivors: str = "") -> None:
        """Raises unless the job succeeded; ``survivors`` is what of it could not be ended."""
        handle = started.handle
        if self._cancelled:
            raise JobLost(
                f"job {handle.job_id} was cancelled; {survivors or 'every process of it was ended'}"
            )
        if status.state is JobState.SUCCEEDED:
            self.images = status.images
            return
        if status.state is JobState.PREEMPTED:
            raise JobPreempted(f"{status.reason} {survivors}".rstrip(), step=status.step)
        if status.apart:
            raise TrainedApart(f"{status.reason} {survivors}".rstrip())
        failure = status.failure
        if failure is None:
            said = handle.log_dir / "launcher.log"
            self._show(said, started)
            why = status.reason or (
                f"job {handle.job_id} ended and not every rank did its work, yet none failed by "
                "itself."
            )
            if survivors:
                why += f" And {survivors}"
            raise JobLost(
                f"{why} What its launcher said is above and in {said}",
                retryable=not status.permanent,
            )
        path = self._launcher.log(handle, failure.rank)
        if failure.rank != 0:  # whose output is above
            self._show(path, started)
        raise JobFailed(
            f"{explained(failure, handle.world_size)} "
            f"{f'But {survivors}' if survivors else 'All ranks were ended.'} Its whole log: {path}",
            rank=failure.rank,
            host=failure.host,
            exit_code=failure.exit_code,
            retryable=not failure.permanent,
        )

    def _show(self, path: Path, started: StartedJob) -> None:
        try:
            with open(open_beneath(path, run_folder(started.handle)), "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(started.sizes.get(path.name, 0), end - _LAST_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return
        except (FileRefused, OSError) as error:
            self._log.error("%s", error)
            return
        last = deque(_Shown(path).of(lines), _LAST_LINES)
        self._log.error("::group::last %d lines of %s", len(last), path.name)
        for line in last:
            self._log.error("%s | %s", path.stem, _short(line))
        self._log.error("::endgroup::")


def kept_job(path: Path) -> StartedJob | None:
    """The job that an earlier process noted there, if its end was not dealt with."""
    try:
        return StartedJob.load(read_object(path, path.parent.parent))
    except FileNotFoundError:
        return None
    except (FileRefused, KeyError, TypeError, ValueError) as error:
        raise LaunchError(
            f"{path} does not say which job runs for the training ({type(error).__name__}: "
            f"{error}). End what runs of it, and delete the file.",
            retryable=False,
        ) from error


def may_run(path: Path, connections: FindConnection = own_connection) -> bool:
    """Whether the job that is noted there may wait or run: unless its scheduler says that it has
    ended, or no job is noted.
    """
    # Not at the top: a DAG that is parsed starts nothing.
    from ddl_airflow.launchers.registry import launcher

    try:
        if (kept := kept_job(path)) is None:
            return False
        scheduler = launcher(kept.handle.kind, None, connections)
        assert isinstance(scheduler, Scheduler), kept.handle.kind
        status = scheduler.status(scheduler.find(kept.handle))
    except (DdlError, OSError) as error:
        _log.warning("%s: it is not known whether this job has ended: %s", path, error)
        return True
    return not status.ended or status.is_left


def cancel_all_noted(
    folder: Path,
    run_is_open: Callable[[str, str], bool],
    connections: FindConnection = own_connection,
    *,
    dry_run: bool = False,
) -> Iterator[str]:
    """Cancels the jobs of which it is noted that they are to be; yields each that there was.

    Args:
        folder: with the notes.
        run_is_open: whether Airflow has not ended the run of a DAG id and a run id. It is asked
            where nobody has waited for the job of a run for a week: ``UNKNOWN_S``.
        connections: finds one by its id.
        dry_run: to cancel nothing, and to note nothing of what cannot be.
    """
    # Not at the top: a DAG that is parsed starts nothing.
    from ddl_airflow.launchers.registry import launcher

    for noted in cancellations_in(folder, dry_run=dry_run):
        handle = noted.started.handle
        if noted.task is not None and not _is_given_up(noted, run_is_open):
            continue
        if cancellation_of(noted.started) != noted:  # it was read before the others were cancelled
            continue
        try:
            scheduler = launcher(handle.kind, None, connections)
            assert isinstance(scheduler, Scheduler), handle.kind
            cancelled = dry_run or cancel_noted(scheduler, noted.started)
        except Exception as error:  # whatever it is, the others are cancelled
            say_undone(noted, str(error), _log, dry_run=dry_run)
        else:
            if cancelled:
                yield name_of(handle)


def _is_given_up(noted: Cancellation, run_is_open: Callable[[str, str], bool]) -> bool:
    """Whether nobody waits for the job of a task, and its run has ended."""
    assert noted.task is not None
    # A run that is unknown may be of another Airflow, in which somebody waits for the job.
    if not noted.unattended:
        return False
    try:
        dag_id, run_id = noted.task["dag_id"], noted.task["run_id"]
        return not run_is_open(dag_id, run_id)
    except Exception as error:  # of whom it asks: whether the job can be cancelled is not known
        _log.warning(
            "%s stays noted: whether its run is open is not known: %s: %s",
            *(name_of(noted.started.handle), type(error).__name__, error),
        )
    return False


class ScheduledJob(RunningJob):
    """A job that a scheduler runs, while a trigger waits for it and no task.

    Args:
        launcher: who runs it.
        log: a logger.
        kept: the file that says which job this is, for whoever comes after this process.
        cancellations: folder in which it is noted which jobs are to be cancelled.
        task: of Airflow, as ``Cancellation`` has it: its job is to be cancelled if it has ended;
            None where nobody could say that it has.
    """

    _launcher: Scheduler

    def __init__(
        self,
        launcher: Scheduler,
        log: Any,
        kept: Path,
        cancellations: Path,
        task: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(launcher, log)
        self._kept = kept
        self._cancellations = cancellations
        self._task = task
        self._started: StartedJob | None = None
        self._last = JobStatus(JobState.RUNNING)
        self._next_look = 0.0
        self._said = ""

    def adopt(self) -> StartedJob | None:
        """The job that an earlier process submitted, and could not wait for to its end.

        Raises:
            LaunchError: it is not known whether a job of an earlier process still runs.
            JobLost: it was cancelled meanwhile, or this was.
            JobPreempted: it had to make room, and nobody has dealt with that.
        """
        orphan = kept_job(self._kept)
        if orphan is None:
            return None
        self._started = orphan
        handle = self._find(orphan)
        orphan = replace(orphan, handle=handle)
        status = self._launcher.status(handle)
        if status.state is JobState.PREEMPTED:  # its caller notes that first
            raise JobPreempted(status.reason, step=status.step)
        # One whose ranks trained apart is gone on with to its end, which says so.
        if status.ended and status.state is not JobState.SUCCEEDED and not status.apart:
            if status.is_left:  # it waits all the same, and starts if its reason is mended
                self._launcher.cancel(handle, GRACE_S)
            self.drop_note()
            return None
        noted = cancellation_of(orphan)
        if not status.ended and (orphan.monitored or (noted and noted.task is None)):
            # Somebody waited for it, and a new try began all the same: a person cleared the task
            # (then its trigger cancels it, perhaps only now), or Airflow gave up on the trigger.
            # Or a person ended the task before that, and it could not cancel its job any more.
            self._give_up(handle)
            return None
        self._log.info("going on with %s, submitted by a process that is gone", name_of(handle))
        self._submitted(orphan)
        return orphan

    def give_up(self) -> None:
        """Ends the job that an earlier process left, with which nobody is to go on.

        Raises:
            LaunchError: it is not known whether it runs, or it does not end.
            JobLost: this was cancelled meanwhile.
        """
        if (orphan := kept_job(self._kept)) is not None:
            self._started = orphan
            self._give_up(self._find(orphan))

    def submit(self, job: JobSpec, progress_path: Path) -> StartedJob:
        """A new job.

        Raises:
            SubmitFailed: nothing could be started.
            JobLost: it was cancelled before or meanwhile.
        """
        submission = self._prepare(job)
        note = self._kept.with_name(f"{job.record_dir.name}.watched")
        note.unlink(missing_ok=True)  # of a deleted run of that id
        # First what to look for: this process may end before it knows the answer.
        started = StartedJob(
            self._launcher.expected(job),
            time.time(),
            _sizes(job),
            _end_of(progress_path),
            note,
            cancellation_file(self._cancellations, job.job_id),
        )
        drop_cancellation(started)
        self._note_condition(started)  # nobody need come after a process that is killed
        self._started = started  # from here on, being cancelled is noted
        if self._cancelled:
            drop_cancellation(started)
            raise JobLost(f"job {job.job_id} was cancelled before it was submitted")
        self._keep(started)
        try:
            started = replace(started, handle=self._launcher.submit(submission))
        except SubmitFailed as refused:
            if refused.refused:
                self.drop_note()
            raise
        self._log.info("submitted as %s job %d", started.handle.kind, started.handle.number)
        self._submitted(started)
        return started

    def finish(
        self, started: StartedJob, status: JobStatus | None, error: DdlError | None = None
    ) -> None:
        """Says what the job said, and returns if it succeeded; raises as ``run`` does.

        Args:
            started: the job.
            status: how it ended; None: it is followed to its end.
            error: why it was ended, where that is known better than it is to the scheduler.
        """
        self._handle, self._started = started.handle, started
        # Where the scheduler does not answer, the job may run on: the next try is to know of it.
        status = self._follow(started, status)
        if status.is_left:  # it may still wait, or run
            self._launcher.cancel(started.handle, GRACE_S)
        try:
            if error is not None:
                raise error
            self._conclude(started, status)
        except JobPreempted:  # its caller notes that first
            raise
        except DdlError:
            self.drop_note()
            raise

    def cancel(self) -> None:
        """Has the scheduler end the job. Safe before it is submitted and after it ended.

        Airflow gives this a few seconds, and the scheduler may need longer: so it is noted first,
        also of a job that is just being submitted.
        """
        noting = threading.Thread(target=self._note_cancellation, daemon=True)
        noting.start()
        noting.join(_NOTING_S)
        super().cancel()
        if self._handle is not None and self._started is not None and not noting.is_alive():
            drop_cancellation(self._started)

    def _note_cancellation(self) -> None:
        if self._started is not None:
            note_cancellation(self._started)
            with suppress(OSError):  # so that the next try waits for its end, as for an orphan's
                self._started.mark_monitored()

    def cancel_orphan(self) -> None:
        """Cancels what an earlier process left, if it still runs; nobody goes on with it."""
        orphan = kept_job(self._kept)
        if orphan is not None:
            try:
                # First: the scheduler may not answer, and a job may take long to end.
                orphan.mark_monitored()
            finally:
                note_cancellation(orphan)
                self._launcher.cancel(orphan.handle, GRACE_S)
                drop_cancellation(orphan)

    def drop_note(self) -> None:
        """Its end was dealt with: the next process starts a new job."""
        self._kept.unlink(missing_ok=True)
        if self._started is not None:
            drop_cancellation(self._started)

    def _status(self, handle: JobHandle) -> JobStatus:
        """What its scheduler said last. It is asked now and then, for each question may start a
        process; and its not answering is outlasted, as a trigger does: the job goes on.
        """
        if time.monotonic() >= self._next_look:
            try:
                self._last = self._launcher.status(handle)
            except (LaunchError, OSError) as error:
                if isinstance(error, LaunchError) and not error.retryable:
                    raise
                if str(error) != self._said:
                    self._said = str(error)
                    self._log.warning("%s Asking again.", error)
            self._next_look = time.monotonic() + _LOOK_S
        return self._last

    def _submitted(self, started: StartedJob) -> None:
        self._handle, self._started = started.handle, started
        self._keep(started)
        self._note_condition(started)
        if self._cancelled:  # while the scheduler was being asked
            self.cancel()
            raise JobLost(f"job {started.handle.job_id} was cancelled")

    def _find(self, started: StartedJob) -> JobHandle:
        """The job, by the number that its scheduler knows it by.

        Without a number only once the scheduler can no longer take it: what submits it may outlive
        the process that was killed, and another one would then be submitted beside it.
        """
        most_s = started.handle.submit_s
        # Whatever the clocks say.
        left_s = min(max(started.started + most_s - time.time(), _SOON_S), most_s)
        deadline = time.monotonic() + left_s
        said = False
        wait_s = _ASK_S
        while True:
            late = time.monotonic() >= deadline
            handle = self._launcher.find(started.handle)
            if handle.number or late:
                return handle
            if self._cancelled:
                raise JobLost(f"job {handle.job_id} was cancelled before it was found")
            if not said:
                said = True
                self._log.info(
                    "job %s was not found, and %s may still take it: looking for %.0f s",
                    *(handle.job_id, handle.kind, left_s),
                )
            time.sleep(min(wait_s, max(0.0, deadline - time.monotonic())))
            wait_s = min(1.5 * wait_s, _LOOK_S)

    def _give_up(self, handle: JobHandle) -> None:
        self._log.info("%s was given up; waiting for its end", name_of(handle))
        self._end(handle)
        self.drop_note()

    def _end(self, handle: JobHandle) -> None:
        patience_s = END_S + handle.grace_s
        deadline = time.monotonic() + patience_s
        self._launcher.cancel(handle, GRACE_S)
        while not self._launcher.status(handle).ended:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{handle.kind} job {handle.number} of an earlier try was cancelled, and has "
                    f"not ended in {patience_s:.0f} s. A second one is not started beside it."
                )
            time.sleep(_ASK_S)

    def _note_condition(self, started: StartedJob) -> None:
        if self._task is not None:
            note_cancellation(started, self._task)

    def _keep(self, started: StartedJob) -> None:
        said = json.dumps(started.dump()).encode()
        write_beneath(self._kept, self._kept.parent.parent, said)


def _sizes(job: JobSpec) -> dict[str, int]:
    return {path.name: path.lstat().st_size for path in job.log_dir.glob("*.log")}


def _end_of(path: Path | None) -> tuple[Path, int] | None:
    if path is None:
        return None
    return path, path.lstat().st_size if path.exists() else 0

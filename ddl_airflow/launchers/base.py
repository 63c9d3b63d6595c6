"""What every launcher can do.

``submit = render + start``: ``render`` is pure and returns the exact command, which tests compare
and users read; only ``submit`` touches the world.

A launcher does not retry (Airflow does), does not wait (its caller polls), and does not decide
success from mpirun's exit code: see ``records.ranks_status``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ddl_airflow.core.cancellations import drop_cancellation
from ddl_airflow.core.connections import FindConnection
from ddl_airflow.core.job import JobHandle, JobSpec, JobStatus, StartedJob, Submission

# Airflow kills a task 5 s after SIGTERM; the ranks must be gone before.
GRACE_S = 3.0
# So long a submission may take of which the scheduler's own limit is not known.
_SUBMITTED_S = 60.0
# More than Slurm's KillWait, after which it kills what did not end by itself. The grace of a handle
# is to be added.
END_S = 120.0


class Launcher(Protocol):
    """Starts the ranks of one job, watches and ends them."""

    kind: str

    def render(self, job: JobSpec) -> Submission:
        """The exact command for the job. Pure."""
        ...

    def submit(self, submission: Submission) -> JobHandle:
        """Starts the ranks. Raises SubmitFailed when nothing could be started."""
        ...

    def status(self, handle: JobHandle) -> JobStatus:
        """Where the job stands. Never blocks."""
        ...

    def cancel(self, handle: JobHandle, grace_s: float) -> None:
        """Ends every process of the job: SIGTERM, then SIGKILL after the grace. Idempotent."""
        ...

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The file with one rank's output."""
        ...


@runtime_checkable
class Preparing(Launcher, Protocol):
    """A launcher that looks before it starts: at hosts, which may not be well."""

    def prepare(self, job: JobSpec, log: Any) -> JobSpec:
        """The job as it can run, on the hosts that it is to run on; they have all that it needs.

        Args:
            job: as it was asked for.
            log: a logger, for what a person should know.

        Raises:
            SubmitFailed: it cannot run; names each host at fault, and the cure.
        """
        ...

    def abandon(self) -> None:
        """Takes back what ``prepare`` did for a job that is not submitted. May come twice."""
        ...


@runtime_checkable
class Bringing(Preparing, Protocol):
    """A launcher that brings from hosts what its ranks save there."""

    def look_at_brought(self, look: Callable[[], None]) -> None:
        """Says what ``prepare`` does once it has brought what an earlier try left on a host.

        Args:
            look: called before any of it is sent; what it raises, ``prepare`` raises.
        """
        ...


@runtime_checkable
class Connecting(Launcher, Protocol):
    """A launcher that may be told by an Airflow connection how to reach its place."""

    def find_connections(self, find: FindConnection) -> None:
        """Says how it finds one by its id. It asks when it needs it, and not before."""
        ...

    def connection_of(self, handle: JobHandle) -> str:
        """The id of the connection by which a job is reached; empty for none."""
        ...


# What a scheduler says of a job, in its own words; nothing if it knows none.
Told = Mapping[str, str]


@runtime_checkable
class Scheduler(Launcher, Protocol):
    """A launcher whose jobs do not end with the process that submitted them.

    Any process finds them again by their handle, so nobody needs to wait for them.
    ``submit`` may raise and the job be there all the same, if the answer was lost: ``find`` knows.
    """

    def expected(self, job: JobSpec) -> JobHandle:
        """The handle of a job before it is submitted: without its number. Makes nothing.

        Its place is one that other processes find: the caller keeps it before it submits.

        Raises:
            SubmitFailed: it is not known where that would be.
        """
        ...

    def find(self, handle: JobHandle) -> JobHandle:
        """The handle with the number that the scheduler knows the job by, 0 if it knows none."""
        ...

    def ask(self, handles: Sequence[JobHandle]) -> list[Told]:
        """What the scheduler says of each job, with one question for all of them.

        Raises:
            LaunchError: it does not answer.
        """
        ...

    def conclude(self, handle: JobHandle, told: Told) -> JobStatus:
        """The status of a job of which ``ask`` said that. Asks nobody; may read ranks' records."""
        ...


def cancel_noted(scheduler: Scheduler, started: StartedJob) -> bool:
    """Cancels a job of which it is noted that it is to be; the note then goes.

    Returns:
        Whether it was; not so where there is no such job. Then the note stays while the scheduler
        may still take it.

    Raises:
        LaunchError: the scheduler does not answer.
    """
    handle = scheduler.find(started.handle)
    if handle.number:
        scheduler.cancel(handle, GRACE_S)
    elif time.time() < started.started + max(handle.submit_s, _SUBMITTED_S):
        return False
    drop_cancellation(started)
    return handle.number != 0

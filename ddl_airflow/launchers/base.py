"""What every launcher can do.

``submit = render + start``: ``render`` is pure and returns the exact command, which tests compare
and users read; only ``submit`` touches the world.

A launcher does not retry (Airflow does), does not wait (its caller polls), and does not decide
success from mpirun's exit code: see ``ranks_status``.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import FileRefused, LaunchError
from ddl_airflow.core.job import (
    JobHandle,
    JobSpec,
    JobState,
    JobStatus,
    RankFailure,
    StartedJob,
    Submission,
)
from ddl_airflow.core.progress import Tail

# Airflow kills a task 5 s after SIGTERM; the ranks must be gone before.
GRACE_S = 3.0
# More than Slurm's KillWait, after which it kills what did not end by itself.
END_S = 120.0

# Exceptions that end the next try in the same way: the code itself is wrong.
_PERMANENT_EXCEPTIONS = frozenset({"SyntaxError", "ImportError", "LeftTensorFlow"})
# What the ops, and TensorFlow's servers, raise on the others when a rank dies, ends or gives up a
# step; docs/ops.md.
_CONSEQUENCES = frozenset({"AbortedError", "FailedPreconditionError", "UnavailableError"})
_COMMAND_NOT_FOUND = 127
# Fields of a rank's record, by what they hold; docs/process-contract.md.
_TIMES = ("started", "ended", "asked_to_end", "released")
_TEXTS = ("host", "task", "reason")
_LARGEST = 2**53  # a float holds it exactly
_LONGEST = 10_000
_NOT_EXECUTABLE = 126


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


# What a scheduler says of a job, in its own words; nothing if it knows none.
Told = Mapping[str, str]


@runtime_checkable
class Scheduler(Launcher, Protocol):
    """A launcher whose jobs do not end with the process that submitted them.

    Any process finds them again by their handle, so nobody needs to wait for them.
    ``submit`` may raise and the job be there all the same, if the answer was lost: ``find`` knows.
    """

    def expected(self, job: JobSpec) -> JobHandle:
        """The handle of a job before it is submitted: without its number. Pure."""
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


def read_records(handle: JobHandle) -> dict[int, dict[str, Any]]:
    """What the ranks of a job have recorded so far, by rank; fields of another type are left out.

    Raises:
        LaunchError: a record is a link, or holds no JSON object.
    """
    records = {}
    for rank in range(handle.world_size):
        path = handle.record_dir / f"rank-{rank}.json"
        try:
            records[rank] = _sound(read_object(path, run_folder(handle))) | {"rank": rank}
        except FileNotFoundError:
            continue
        except FileRefused as error:
            raise LaunchError(f"rank {rank}: {error}", retryable=False) from error
    return records


def over_since(handle: JobHandle) -> float | None:
    """When a job was over for its ranks, in seconds since 1970; None: it is not.

    That is when the first failed, which ends the others, or when all had ended.
    """
    records = read_records(handle)
    failed = [at for record in records.values() if (at := _failed_at(record)) is not None]
    if failed:
        return min(failed)
    ended = [float(record["ended"]) for record in records.values() if "ended" in record]
    return max(ended) if len(ended) == handle.world_size else None


def run_folder(handle: JobHandle, *others: Path) -> Path:
    """The folder beneath which no link is followed: that of the run, with records and logs."""
    return Path(os.path.commonpath([handle.record_dir, handle.log_dir, *others]))


def reports_of(started: StartedJob) -> Tail | None:
    """What a job reports from its start on, if its script may report."""
    if started.progress is None:
        return None
    path, offset = started.progress
    return Tail(path, offset, run_folder(started.handle, path.parent))


def _sound(said: dict[str, Any]) -> dict[str, Any]:
    """A record without what has not the type that it should have: scripts may write there too."""
    record: dict[str, Any] = {"host": ""}
    record |= {name: float(said[name]) for name in _TIMES if _is_number(said.get(name))}
    record |= {name: _text(said[name]) for name in _TEXTS if isinstance(said.get(name), str)}
    code = said.get("exit_code")
    # A rank records its end and its exit code at once.
    if type(code) is int and 0 <= code <= 255 and "ended" in record:
        record["exit_code"] = code
    if isinstance(gpus := said.get("gpus"), list):
        record["gpus"] = [_text(one) for one in gpus if isinstance(one, str)]
    if isinstance(versions := said.get("versions"), dict):
        record["versions"] = {
            _text(name): _text(one) for name, one in versions.items() if isinstance(one, str)
        }
    if isinstance(exception := said.get("exception"), dict):
        raised, line, bases = (exception.get(name) for name in ("t", "line", "bases"))
        record["exception"] = {
            "t": float(raised) if _is_number(raised) else 0.0,
            "line": line if type(line) is int and _is_number(line) else 0,
            "bases": [one for one in bases if isinstance(one, str)]
            if isinstance(bases, list)
            else [],
            **{name: _text(exception.get(name) or "") for name in ("type", "message", "file")},
        }
    return record


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= _LARGEST  # not so NaN


def _text(value: object) -> str:
    """What can be shown and written as UTF-8."""
    return str(value)[:_LONGEST].encode("utf-8", "replace").decode()


def ranks_status(handle: JobHandle, *, running: bool) -> JobStatus:
    """The state of a job from what its ranks left on disk.

    Every rank must have reached its end: exit code 0 in each of ``world_size`` records, or that it
    was released, as parameter servers are when all others have done their work.

    Args:
        handle: the job.
        running: whether the process that holds the ranks together still lives.
    """
    if running:
        return JobStatus(JobState.RUNNING)
    records = read_records(handle)
    ended = {rank: r for rank, r in records.items() if "exit_code" in r}
    if len(ended) == handle.world_size and all(map(_did_its_work, ended.values())):
        return JobStatus(JobState.SUCCEEDED)
    failure = _first_failure(handle, records)
    return JobStatus(JobState.FAILED if failure else JobState.LOST, failure)


def _did_its_work(record: dict[str, Any]) -> bool:
    # One that was asked to end stopped before its work was done, however well it took it.
    return "released" in record or (record["exit_code"] == 0 and "asked_to_end" not in record)


def _first_failure(handle: JobHandle, records: dict[int, dict[str, Any]]) -> RankFailure | None:
    # One rank's failure ends all, so most records tell of a consequence. The cause is the first
    # that raised, or that ended badly without having been asked to; but for those that raised
    # because they saw another one die, perhaps before its end was recorded.
    failed = [(_failed_at(r), r) for r in records.values() if _failed_at(r) is not None]
    causes = [(at, r) for at, r in failed if not _saw_another_die(r)]
    if causes:
        return _explain(min(causes, key=lambda pair: pair[0] or 0.0)[1])
    for rank, record in records.items():
        if not {"ended", "asked_to_end", "exception"} & record.keys():
            return RankFailure(
                rank=rank,
                host=str(record["host"]),
                exit_code=None,
                reason="was killed without a word (SIGKILL; often the machine ran out of memory)",
                task=str(record.get("task", "")),
            )
    if failed:
        return _explain(min(failed, key=lambda pair: pair[0] or 0.0)[1])
    return None


def _saw_another_die(record: dict[str, Any]) -> bool:
    return record.get("exception", {}).get("type") in _CONSEQUENCES


def _failed_at(record: dict[str, Any]) -> float | None:
    if "released" in record:
        return None
    told = float(record.get("asked_to_end", math.inf))
    if "exception" in record and record.get("exit_code") != 0:
        raised = float(record["exception"]["t"])
        return raised if raised < told else None
    if record.get("exit_code", 0) != 0 and "asked_to_end" not in record:
        return float(record["ended"])
    return None


def _explain(record: dict[str, Any]) -> RankFailure:
    code = int(record.get("exit_code", 1))
    exception = record.get("exception", {})
    name = str(exception.get("type", ""))
    permanent = code in (_COMMAND_NOT_FOUND, _NOT_EXECUTABLE) or bool(
        _PERMANENT_EXCEPTIONS & {name, *exception.get("bases", [])}
    )
    if name:
        place = f" at {exception['file']}:{exception['line']}" if exception.get("file") else ""
        reason = f"raised {name}{place}: {exception.get('message', '')}"
    elif code == _COMMAND_NOT_FOUND:
        reason = f"did not start: command not found ({record.get('reason', 'see its log')})"
    elif code == _NOT_EXECUTABLE:
        reason = f"did not start: command cannot be run ({record.get('reason', 'see its log')})"
    elif code > 128:
        reason = f"was ended by {_signal_name(code - 128)}" + (
            " (often the machine ran out of memory)" if code - 128 == signal.SIGKILL else ""
        )
    else:
        why = f" ({record['reason']})" if "reason" in record else ""
        reason = f"exited with code {code}{why}"
    return RankFailure(
        rank=int(record["rank"]),
        host=str(record["host"]),
        exit_code=code,
        reason=reason,
        exception=name,
        permanent=permanent,
        task=str(record.get("task", "")),
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

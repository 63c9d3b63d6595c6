"""Launchers without processes, for tests of DAGs and operators: ours, and users'."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus, Submission
from ddl_airflow.launchers.base import ranks_status


class FakeLauncher:
    """Ends every job at once with the exit codes it was given.

    Args:
        exit_codes: one per rank; shorter lists are filled with 0. None for a rank
            that was killed with SIGKILL: its record has no end.
        output: what each rank is said to have printed.
    """

    kind = "fake"

    def __init__(self, exit_codes: Sequence[int | None] = (), output: str = "") -> None:
        self.exit_codes = list(exit_codes)
        self.output = output
        self.submitted: list[Submission] = []
        self.cancelled: list[JobHandle] = []

    def render(self, job: JobSpec) -> Submission:
        """A submission whose argv is the command's words."""
        return Submission(job, tuple(job.command.split()), dict(job.env))

    def submit(self, submission: Submission) -> JobHandle:
        """Writes the records that ranks would leave."""
        job = submission.job
        self.submitted.append(submission)
        job.record_dir.mkdir(parents=True, exist_ok=True)
        job.log_dir.mkdir(parents=True, exist_ok=True)
        codes = self.exit_codes + [0] * (job.world_size - len(self.exit_codes))
        for rank, code in enumerate(codes[: job.world_size]):
            (job.log_dir / f"rank-{rank}.log").write_text(self.output, "utf-8")
            record: dict[str, object] = {"rank": rank, "host": "fake"}
            if code is not None:
                record |= {"ended": float(rank), "exit_code": code}
            (job.record_dir / f"rank-{rank}.json").write_text(json.dumps(record), "utf-8")
        return JobHandle(
            self.kind, job.job_id, os.getpid(), job.world_size, job.record_dir, job.log_dir
        )

    def status(self, handle: JobHandle) -> JobStatus:
        """What the records say; a fake job never runs on."""
        return ranks_status(handle, running=False)

    def cancel(self, handle: JobHandle, grace_s: float = 0.0) -> None:
        """Remembers that it was asked to."""
        self.cancelled.append(handle)

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The file with ``output``."""
        return handle.log_dir / f"rank-{rank}.log"


class FakeScheduler:
    """A queue in a folder, in which every job waits until it is told how it goes.

    All instances over the folder see the same jobs, as processes that ask one scheduler do.

    Args:
        folder: made if missing.
    """

    kind = "fake-scheduler"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def render(self, job: JobSpec) -> Submission:
        """A submission whose argv is the command's words."""
        return Submission(job, tuple(job.command.split()), dict(job.env))

    def expected(self, job: JobSpec) -> JobHandle:
        """The handle without its number."""
        return JobHandle(self.kind, job.job_id, 0, job.world_size, job.record_dir, job.log_dir)

    def submit(self, submission: Submission) -> JobHandle:
        """Puts the job into the queue."""
        submission.job.record_dir.mkdir(parents=True, exist_ok=True)
        submission.job.log_dir.mkdir(parents=True, exist_ok=True)
        number = max(self.numbers(), default=0) + 1
        handle = replace(self.expected(submission.job), number=number)
        told = {"handle": asdict(handle), "state": "pending", "reason": ""}
        self._write(number, told)
        return handle

    def numbers(self) -> list[int]:
        """Of all jobs that were ever submitted."""
        return sorted(int(path.stem) for path in self.folder.glob("*.json"))

    def state(self, number: int) -> str:
        """How a job goes: a value of JobState."""
        return str(self._read(number)["state"])

    def set(self, number: int, state: str, reason: str = "", output: str = "") -> None:
        """Says how a job goes from now on: a value of JobState; when it succeeds, ranks say so."""
        told = self._read(number) | {"state": state, "reason": reason}
        self._write(number, told)
        if state == JobState.SUCCEEDED.value:
            handle = told["handle"]
            for rank in range(handle["world_size"]):
                Path(handle["log_dir"], f"rank-{rank}.log").write_text(output, "utf-8")
                record = {"rank": rank, "host": "fake", "ended": float(rank), "exit_code": 0}
                path = Path(handle["record_dir"], f"rank-{rank}.json")
                path.write_text(json.dumps(record), "utf-8")

    def find(self, handle: JobHandle) -> JobHandle:
        """By its id, where its number is not known."""
        named = [n for n in self.numbers() if self._read(n)["handle"]["job_id"] == handle.job_id]
        return handle if handle.number else replace(handle, number=max(named, default=0))

    def status(self, handle: JobHandle) -> JobStatus:
        """What ``set`` said."""
        if not (number := self.find(handle).number):
            return JobStatus(JobState.LOST)
        told = self._read(number)
        return JobStatus(JobState(told["state"]), reason=told["reason"])

    def cancel(self, handle: JobHandle, grace_s: float = 0.0) -> None:
        """Ends a job that has not ended."""
        if not self.status(handle).ended:
            self.set(self.find(handle).number, JobState.LOST.value, "cancelled")

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The rank's own file."""
        return handle.log_dir / f"rank-{rank}.log"

    def _read(self, number: int) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / f"{number}.json").read_text("utf-8"))
        return told

    def _write(self, number: int, told: dict[str, Any]) -> None:
        path = self.folder / f"{number}.json"
        path.with_suffix(".new").write_text(json.dumps(told, default=str), "utf-8")
        path.with_suffix(".new").replace(path)

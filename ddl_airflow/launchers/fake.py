"""Launchers without processes, for tests of DAGs and operators: ours, and users'."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from ddl_airflow.core.job import JobHandle, JobSpec, JobStatus, Submission
from ddl_airflow.launchers.records import ranks_status


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
            record: dict[str, object] = {"rank": rank, "host": "fake", "ddl": {"averaged": True}}
            if code is not None:
                record |= {"ended": float(rank), "exit_code": code}
            (job.record_dir / f"rank-{rank}.json").write_text(json.dumps(record), "utf-8")
        return job.handle(self.kind, os.getpid())

    def status(self, handle: JobHandle) -> JobStatus:
        """What the records say; a fake job never runs on."""
        return ranks_status(handle, running=False)

    def cancel(self, handle: JobHandle, grace_s: float = 0.0) -> None:
        """Remembers that it was asked to."""
        self.cancelled.append(handle)

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The file with ``output``."""
        return handle.log_dir / f"rank-{rank}.log"

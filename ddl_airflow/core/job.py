"""A job is one launch of ``world_size`` ranks. These values cross between launcher and caller."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ddl_airflow.core.cluster import Cluster


@dataclass(frozen=True)
class JobSpec:
    """What to run, and where its traces go.

    Attributes:
        job_id: unique for each try; every process of the job carries it as ``DDL_JOB_ID``.
        command: one command, as the manifest writes it.
        nodes: hosts to use.
        slots: ranks on each node; ``nodes * slots`` is the world size under MPI.
        python: the interpreter that starts a rank (design: it may belong to another environment).
        folder: where the command runs.
        record_dir: where each rank leaves ``rank-<n>.json``; empty at the start of a try.
        log_dir: where each rank's output goes, ``rank-<n>.log``.
        env: what every rank finds in its environment, besides what the launcher adds.
        cluster: the tasks of a job that runs with TF_CONFIG; each is a rank. None under MPI.
        inherits: file descriptors that the process which holds the ranks together keeps open.
    """

    job_id: str
    command: str
    nodes: int
    slots: int
    python: str
    folder: Path
    record_dir: Path
    log_dir: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cluster: Cluster | None = None
    inherits: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.size if self.cluster else self.nodes * self.slots


@dataclass(frozen=True)
class Submission:
    """Exactly what a launcher will run, as a value: print it, compare it, then submit it."""

    job: JobSpec
    argv: tuple[str, ...]
    env: Mapping[str, str]

    def __str__(self) -> str:
        return shlex.join(self.argv)


@dataclass(frozen=True)
class JobHandle:
    """Enough to find a submitted job again.

    Attributes:
        kind: the launcher's name in the registry.
        job_id: as in the JobSpec.
        pid: of the process that holds the ranks together, on this host.
        world_size: ranks that must each leave a record.
        record_dir, log_dir: as in the JobSpec.
    """

    kind: str
    job_id: str
    pid: int
    world_size: int
    record_dir: Path
    log_dir: Path


class JobState(Enum):
    """Where a job stands."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    LOST = "lost"


@dataclass(frozen=True)
class RankFailure:
    """How the first rank failed.

    Attributes:
        rank: its number.
        host: where it ran; empty when it left no record.
        exit_code: as a shell shows it (128 + signal); None when it was killed without a word.
        reason: one sentence.
        exception: type name of the Python exception that ended the script, or empty.
        permanent: the same again would fail the same way.
        task: which task of a cluster it was, such as ``worker 1``; empty under MPI.
    """

    rank: int
    host: str
    exit_code: int | None
    reason: str
    exception: str = ""
    permanent: bool = False
    task: str = ""


@dataclass(frozen=True)
class JobStatus:
    """State of a job, and its first failed rank if one is known."""

    state: JobState
    failure: RankFailure | None = None

"""A job is one launch of ``world_size`` ranks. These values cross between launcher and caller."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ddl_airflow.core.cluster import Cluster

# 128 and the last signal of Linux: an exit code beyond, as 255 of ``sys.exit(-1)``, is of none.
LAST_OF_SIGNALS = 128 + 64


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
        gpu: whether each rank expects a GPU of its own; for who has to ask for it.
        lock: file that the job must hold alone while it runs, where its caller does not wait and
            so cannot; None for none.
        keep: folder of which the job leaves a copy, and where, when it has ended well and before it
            lets go of ``lock``; None for none.
        user: name of the user that the job runs as; empty for the one that starts it.
        averages: whether its ranks are to train one model: a job in which none has averaged a
            gradient has then failed, however well its ranks ended.
        trained_before: how the last try of these scripts that trained did so, ``together`` or
            ``apart``; empty if none has. This one may find nothing left to train.
        hosts: where its ranks are placed, ``slots`` on each, in their order; empty where that is
            not the caller's to say.
        delay_s: seconds that it is to wait before it starts.
        data_comes: whether its data still come while it runs, into a folder of the workspace.
        cache: folder with the files that its data are links to, beside that of all runs; None: it
            has no data.
        cache_bytes: of that folder, on hosts that have one of their own; None: without end.
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
    gpu: bool = False
    lock: Path | None = None
    keep: tuple[Path, Path] | None = None
    user: str = ""
    averages: bool = False
    trained_before: str = ""
    hosts: tuple[str, ...] = ()
    delay_s: float = 0.0
    data_comes: bool = False
    cache: Path | None = None
    cache_bytes: int | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.cluster.size if self.cluster else self.nodes * self.slots

    def ranks_of(self, node: int) -> Sequence[int]:
        """The ranks that run on a node, counted from 0."""
        if self.cluster is not None:
            return self.cluster.ranks_by_node()[node]
        return range(node * self.slots, (node + 1) * self.slots)

    def handle(self, kind: str, number: int, nodes: int = 0) -> JobHandle:
        """What finds the job again; the arguments as JobHandle has them."""
        return JobHandle(
            kind,
            self.job_id,
            number,
            self.world_size,
            self.record_dir,
            self.log_dir,
            self.user,
            self.averages,
            self.trained_before,
            nodes,
            cluster=str(self.cluster) if self.cluster else "",
        )


@dataclass(frozen=True)
class Submission:
    """Exactly what a launcher will run, as a value: print it, compare it, then submit it.

    Attributes:
        script: what the command reads from its standard input; empty for none.
    """

    job: JobSpec
    argv: tuple[str, ...]
    env: Mapping[str, str]
    script: str = ""

    def __str__(self) -> str:
        command = shlex.join(self.argv)
        return f"{command} <<'END'\n{self.script}END" if self.script else command


@dataclass(frozen=True)
class JobHandle:
    """Enough to find a submitted job again.

    Attributes:
        kind: the launcher's name in the registry.
        job_id: as in the JobSpec.
        number: of the process that holds the ranks together, on this host; or the scheduler's
            own of the job, 0 while it is not known.
        world_size: ranks that must each leave a record.
        record_dir, log_dir, user, averages, trained_before: as in the JobSpec.
        nodes: hosts that the ranks must have run on, as many on each; 0 where all run on one.
        place: where the scheduler has it, in the launcher's own words; empty where it has but one.
        cluster: the job's, as text; empty under MPI.
        grace_s: seconds that its ranks have to save when it is cancelled; 0 where that is the
            scheduler's own to say.
        submit_s: seconds from the beginning of its submission in which the scheduler may still
            take it, though who submits it was killed; 0 where it is known at once.
    """

    kind: str
    job_id: str
    number: int
    world_size: int
    record_dir: Path
    log_dir: Path
    user: str = ""
    averages: bool = False
    trained_before: str = ""
    nodes: int = 0
    place: str = ""
    cluster: str = ""
    grace_s: float = 0.0
    submit_s: float = 0.0


class JobState(Enum):
    """Where a job stands.

    ``PREEMPTED``: it was ended to make room, or its host is taken away. It is tried again, and goes
    on from what its ranks saved.
    """

    PENDING = "pending"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    PREEMPTED = "preempted"
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
    """State of a job, and its first failed rank if one is known.

    Attributes:
        reason: what its scheduler says of it: why it waits, where it runs, or why it was ended.
        permanent: it would end the same way again, whatever its ranks did.
        waits: its scheduler still has it, and would start it: it is to be cancelled.
        apart: its ranks ended well and trained apart; ``reason`` says which, and what to do.
        step: of one that was preempted: at which all its ranks have saved, if they did.
        images: of one that succeeded in containers: what these ran, ``name@digest`` where that is
            known.
    """

    state: JobState
    failure: RankFailure | None = None
    reason: str = ""
    permanent: bool = False
    apart: bool = False
    step: int | None = None
    waits: bool = False
    images: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether nothing of it runs, or ever will."""
        return self.state not in (JobState.PENDING, JobState.RUNNING)

    def dump(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self) | {"state": self.state.value}

    @staticmethod
    def load(told: Mapping[str, Any]) -> JobStatus:
        """What ``dump`` returned."""
        failure = told["failure"]
        return JobStatus(
            JobState(told["state"]),
            RankFailure(**failure) if failure else None,
            told["reason"],
            told["permanent"],
            told.get("apart", False),  # none of these was in what an earlier version dumped
            told.get("step"),
            told.get("waits", False),
            tuple(told.get("images", ())),
        )

    @property
    def is_left(self) -> bool:
        """Whether a scheduler may still have it, though it has ended for who waits for it."""
        return self.permanent or self.waits


@dataclass(frozen=True)
class StartedJob:
    """What another process needs to follow a job to its end, and to explain it.

    Attributes:
        handle: the job.
        started: when it was submitted, in unix seconds.
        sizes: bytes that each log had before it, by file name: those are of other tries.
        progress: where rank 0 reports, and how long that file was; None where nobody does.
        note: file that is there while somebody waits for it in place of who submitted it, in a
            folder of Airflow's own; None where nobody does.
        cancellation: file that notes whether, and when, it is to be cancelled: see
            ``ddl_airflow.core.cancellations``; None where nobody would look.
    """

    handle: JobHandle
    started: float
    sizes: Mapping[str, int] = field(default_factory=dict)
    progress: tuple[Path, int] | None = None
    note: Path | None = None
    cancellation: Path | None = None

    @property
    def monitored(self) -> bool:
        """Whether somebody has been waiting for it in place of who submitted it."""
        return self.note is not None and self.note.exists()

    def mark_monitored(self) -> None:
        """Notes that somebody waits for it now."""
        if self.note is not None:
            self.note.touch()

    def unmark_monitored(self) -> None:
        """Nobody does any more, and it goes on all the same."""
        if self.note is not None:
            self.note.unlink(missing_ok=True)

    def dump(self) -> dict[str, Any]:
        """As JSON has it."""
        places = {name: str(getattr(self.handle, name)) for name in _PLACES}
        return {
            "handle": asdict(self.handle) | places,
            "started": self.started,
            "sizes": dict(self.sizes),
            "progress": self.progress and [str(self.progress[0]), self.progress[1]],
            "note": self.note and str(self.note),
            "cancellation": self.cancellation and str(self.cancellation),
        }

    @staticmethod
    def load(told: Mapping[str, Any]) -> StartedJob:
        """What ``dump`` returned."""
        places = {name: Path(told["handle"][name]) for name in _PLACES}
        progress = told["progress"]
        cancellation = told.get("cancellation")  # not in what an earlier version dumped
        return StartedJob(
            JobHandle(**{**told["handle"], **places}),
            told["started"],
            told["sizes"],
            (Path(progress[0]), progress[1]) if progress else None,
            Path(told["note"]) if told["note"] else None,
            Path(cancellation) if cancellation else None,
        )


_PLACES = ("record_dir", "log_dir")

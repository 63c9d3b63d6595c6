"""Where this process stands among the ranks, from its environment alone: no MPI, no TensorFlow."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """This process among the ranks of the job.

    `launched` is False outside mpirun: then there is one rank, this process. `slots` is how many
    ranks each host has, in their order, where that differs; else it is empty.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launched: bool
    slots: tuple[int, ...] = ()

    @property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return len(self.slots) or max(1, self.size // self.local_size)

    @property
    def host(self) -> int:
        """Number of this rank's host, from 0."""
        if not self.slots:
            return self.rank // self.local_size
        return sum(first <= self.rank for first in itertools.accumulate(self.slots))


# Rank, size, local rank, local size of each launcher, the most specific first. Slurm sets
# SLURM_PROCID in batch scripts too, where nothing is parallel, but the step's size in steps only.
_LAUNCHERS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def read_placement(environ: Mapping[str, str] | None = None) -> Placement:
    """The placement that mpirun (Open MPI, MPICH, Intel MPI) or srun put into `environ`.

    Default: os.environ. Raises RuntimeError if a value is not a number.
    """
    environ = os.environ if environ is None else environ
    for rank, size, local_rank, local_size in _LAUNCHERS:
        if rank not in environ or size not in environ:
            continue
        world = _number(environ, size, 1)
        return Placement(
            rank=_number(environ, rank, 0),
            size=world,
            local_rank=_number(environ, local_rank, _number(environ, rank, 0)),
            local_size=_number(environ, local_size, world),
            launched=True,
            slots=_slots(environ, world),
        )
    return Placement(rank=0, size=1, local_rank=0, local_size=1, launched=False)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    # Slurm writes tasks per node as "2(x3)" or "2,1"; the first number is this job's first node.
    text = environ.get(name, str(default)).split("(")[0].split(",")[0]
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(
            f"{name} is {environ[name]!r}, not a number. It is set by mpirun or srun; "
            "remove it if this process was not started by them."
        ) from None


def _slots(environ: Mapping[str, str], world: int) -> tuple[int, ...]:
    """What DDL_SLOTS says of hosts that differ; nothing if it is of another job."""
    words = environ.get("DDL_SLOTS", "").split(",")
    slots = tuple(int(word) for word in words if word.isdecimal())
    return slots if 1 < len(slots) == len(words) and sum(slots) == world else ()


def group_size(environ: Mapping[str, str] | None = None) -> int | None:
    """DDL_GROUP_SIZE: elements that one AllReduceN should hold at most; None: all in one.

    Raises RuntimeError if it is not a positive integer.
    """
    text = (os.environ if environ is None else environ).get("DDL_GROUP_SIZE")
    if text is None:
        return None
    if not text.isdecimal() or int(text) == 0:
        raise RuntimeError(
            f"DDL_GROUP_SIZE is {text!r}. Give a positive number of elements, as in 1000000."
        )
    return int(text)


def sparse_as_dense(environ: Mapping[str, str] | None = None) -> bool:
    """DDL_SPARSE_AS_DENSE: whether sparse gradients are made dense before they are reduced.

    Default: True. Raises RuntimeError if it is neither 0 nor 1.
    """
    text = (os.environ if environ is None else environ).get("DDL_SPARSE_AS_DENSE", "1")
    if text not in ("0", "1"):
        raise RuntimeError(
            f"DDL_SPARSE_AS_DENSE is {text!r}. Give 1 (dense, the default) or 0 (sparse gradients "
            "stay sparse)."
        )
    return text == "1"


def wire_dtype(environ: Mapping[str, str] | None = None) -> str | None:
    """DDL_WIRE_DTYPE: the type in which gradients travel, "float16" or "bfloat16"; None: their own.

    Raises RuntimeError if it is something else.
    """
    text = (os.environ if environ is None else environ).get("DDL_WIRE_DTYPE")
    if text not in (None, "float16", "bfloat16"):
        raise RuntimeError(
            f"DDL_WIRE_DTYPE is {text!r}. Give float16 or bfloat16, or unset it to send gradients "
            "as they are."
        )
    return text


def sees_all_gpus(environ: Mapping[str, str] | None = None) -> bool:
    """DDL_GPUS: whether each rank sees all GPUs of its host, "all"; unset, it sees its own.

    Raises RuntimeError if it is something else.
    """
    text = (os.environ if environ is None else environ).get("DDL_GPUS")
    if text not in (None, "all"):
        raise RuntimeError(
            f"DDL_GPUS is {text!r}. Give all, or unset it to show each rank its own GPU. How "
            "tensors of GPUs are reduced is what DDL_GPU says."
        )
    return text == "all"


# Every variable of ours, whoever reads it: docs/ops.md and docs/process-contract.md say what each
# is for.
SETTINGS = frozenset(
    """
    DDL_OPTIONS DDL_GROUP_SIZE DDL_SPARSE_AS_DENSE DDL_WIRE_DTYPE DDL_STALL_TIMEOUT DDL_TRANSPORT
    DDL_HOSTID DDL_THREADS DDL_GPU DDL_PROGRESS DDL_PROVE DDL_TIMELINE DDL_STATS DDL_LOG
    DDL_JOB_ID DDL_RECORD_DIR DDL_SLOTS DDL_METRICS DDL_EXCEPTION_FILE DDL_WRITES_FILE DDL_TF1
    DDL_TASK DDL_MPIRUN DDL_RANK_PROCESS DDL_OUTPUT DDL_NO_GPU DDL_CONTRACT DDL_COMMIT_DIR
    DDL_COMMIT_LOCK DDL_SHELL DDL_GPUS
    """.split()
)


def unknown_settings(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each DDL_* variable that nothing reads, with the one that may be meant."""
    said = []
    for name in sorted(os.environ if environ is None else environ):
        if not name.startswith("DDL_") or name in SETTINGS:
            continue
        near = difflib.get_close_matches(name, sorted(SETTINGS), n=1, cutoff=0.0)[0]
        said.append(f"{name} is set, but ddl has no such setting. Did you mean {near}?")
    return said


PLACEMENT = read_placement()

# Which process is the rank, for all that it starts: they inherit the launcher's variables too.
RANK_PROCESS = "DDL_RANK_PROCESS"
# The shell that the rank shim has around a command of several parts.
SHELL = "DDL_SHELL"
# What tells the jobs of one launcher apart: a rank may start a job of its own.
_JOBS = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")


def _rank_process(environ: Mapping[str, str], pid: int) -> str:
    return " ".join([str(pid), *(environ.get(name, "-") for name in _JOBS)])


def claim_rank() -> None:
    """This process is the rank: the first of a job to start communication in its place."""
    os.environ[RANK_PROCESS] = _rank_process(os.environ, os.getpid())


def child_of_rank(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process was forked, spawned or otherwise started by a rank, and so is none.

    PLACEMENT is that of the rank, so that a worker loads the data of its rank.
    """
    environ = os.environ if environ is None else environ
    owner = environ.get(RANK_PROCESS, "")
    pid, _, job = owner.partition(" ")
    return (
        pid.isdecimal()
        and int(pid) != os.getpid()
        and job == _rank_process(environ, os.getpid()).partition(" ")[2]
    )


def checkpoint_folder(what: str) -> str:
    """CHECKPOINT_DIR. Raises ValueError if it is not set, naming `what`, which needs it."""
    if folder := os.environ.get("CHECKPOINT_DIR"):
        return folder
    # Advises no path in the script: it would be used instead of the train task's CHECKPOINT_DIR,
    # where a retry looks.
    raise ValueError(
        f"{what}: CHECKPOINT_DIR is not set. Start the script with: ddl-run --manifest "
        "manifest.yml. Or set it to a folder that all ranks see."
    )


def require_launched(what: str) -> None:
    """Raises RuntimeError if this process was not started as a rank of a job."""
    if not PLACEMENT.launched:
        raise RuntimeError(
            f"{what} needs several ranks, but this process was started alone. "
            "Start it with: ddl-run --np 2 python script.py"
        )
    if child_of_rank():
        raise RuntimeError(
            f"{what} needs a rank, but this process is a child of rank {PLACEMENT.rank}, and no "
            "rank itself: do this in the script itself, or under `if __name__ == '__main__'`, and "
            "pass the result to or from the child."
        )

"""Starting and ending, who and where this rank is, and what is built."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

from ddl_ops import lifecycle
from ddl_ops.environment import PLACEMENT
from ddl_ops.program_order import allow_unnamed_threads
from ddl_ops.training_watch import look_after_training

from horovod.common import util
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    forget,
    global_process_set,
    ids_and_ranks,
)
from horovod.common.settings import take_settings

# The values that Horovod's ops have.
Average, Sum, Adasum, Min, Max, Product = range(6)

_initialized = False


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Starts communication among all ranks. Collective; may be repeated.

    A process that no launcher started is one rank alone.

    Args:
        comm: None, or all ranks, as a list or a communicator of mpi4py in which they have the same
            numbers; an empty list: all. NotImplementedError for others: start these as a job.
            ValueError for what is neither.
        process_sets: added as by process_sets.add_process_set, unless they were before; None or
            "dynamic": none.
    """
    global _initialized
    if comm is not None and not _is_of_all(comm):
        raise NotImplementedError(
            f"hvd.init(comm={comm!r}): only all ranks of the job can start. Start those alone: "
            "ddl-run --np N, or horovodrun -np N."
        )
    take_settings()
    allow_unnamed_threads()
    if PLACEMENT.launched and not lifecycle.initialised():
        lifecycle.init("hvd.init()", by_import=True)
    if PLACEMENT.launched:
        look_after_training()
    _initialized = True
    if process_sets is not None and not isinstance(process_sets, str):
        for one in cast(Iterable[Any], process_sets):
            if one.process_set_id is None:
                add_process_set(one)


def _is_of_all(comm: Any) -> bool:
    if hasattr(comm, "Get_rank"):
        return bool(comm.Get_rank() == PLACEMENT.rank and comm.Get_size() == PLACEMENT.size)
    if not util.is_iterable(comm):
        raise ValueError(
            f"hvd.init(comm={comm!r}): it is no list of ranks, and no communicator of mpi4py. "
            "Leave it out to start all ranks."
        )
    ranks = list(comm)
    return not ranks or ranks == global_process_set.ranks


def shutdown() -> None:
    """From here on it is as before init(), which may follow. Communication ends with the process.

    So a rank may call it before the others do.
    """
    global _initialized
    _initialized = False
    forget()


def is_initialized() -> bool:
    """Whether init() has been called, and shutdown() not since.

    So it is in a process that was forked later, too: it knows its rank, and is none itself, so
    collectives raise RuntimeError there.
    """
    return _initialized


def require_initialized() -> None:
    """Raises ValueError before init(), in Horovod's words: some scripts look for them."""
    if not is_initialized():
        raise ValueError(
            "Horovod has not been initialized; use hvd.init(). Call it first, on every rank."
        )


def rank() -> int:
    """This process's number among all ranks, from 0. ValueError before init()."""
    require_initialized()
    return PLACEMENT.rank


def size() -> int:
    """Number of ranks. ValueError before init()."""
    require_initialized()
    return PLACEMENT.size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0. ValueError before init()."""
    require_initialized()
    return PLACEMENT.local_rank


def local_size() -> int:
    """Number of ranks of this host. ValueError before init()."""
    require_initialized()
    return PLACEMENT.local_size


def cross_rank() -> int:
    """This host's number among those with a rank of this local number. ValueError before init()."""
    require_initialized()
    return sum(host < PLACEMENT.host for host in _alike())


def cross_size() -> int:
    """Number of hosts with a rank of this local number. ValueError before init()."""
    require_initialized()
    return len(_alike())


def _alike() -> list[int]:
    slots = PLACEMENT.slots or (PLACEMENT.local_size,) * PLACEMENT.num_hosts
    return [host for host, ranks in enumerate(slots) if ranks > PLACEMENT.local_rank]


def is_homogeneous() -> bool:
    """Whether all hosts have equally many ranks. ValueError before init()."""
    require_initialized()
    return not PLACEMENT.slots and PLACEMENT.size % PLACEMENT.local_size == 0


def mpi_threads_supported() -> bool:
    """True: MPI is started for several threads, so mpi4py may be used. ValueError before init()."""
    require_initialized()
    return True


def mpi_enabled() -> bool:
    """True: ranks meet by MPI."""
    return True


def mpi_built() -> bool:
    """True: the ops are built on MPI."""
    return util.mpi_built()


def gloo_enabled() -> bool:
    """False: there is no Gloo here."""
    return False


def gloo_built() -> bool:
    """False: there is no Gloo here."""
    return util.gloo_built()


def nccl_built() -> int:
    """Not 0 where tensors on GPUs go over NCCL."""
    return util.nccl_built()


def ddl_built() -> bool:
    """False: IBM's library of that name is not used."""
    return util.ddl_built()


def ccl_built() -> bool:
    """False: there is no oneCCL here."""
    return util.ccl_built()


def cuda_built() -> bool:
    """Whether TensorFlow is built for CUDA."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_cuda())


def rocm_built() -> bool:
    """Whether TensorFlow is built for ROCm."""
    import tensorflow as tf

    return bool(tf.test.is_built_with_rocm())


# What scripts and tests that ask for all sets call.
_get_process_set_ids_and_ranks = ids_and_ranks


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """NotImplementedError: a timeline begins with the ranks."""
    del mark_cycles
    raise NotImplementedError(
        f"hvd.start_timeline({file_path!r}): a timeline is of the whole job here. Start it with "
        f"ddl-run --timeline {file_path}, or HOROVOD_TIMELINE={file_path} in the environment."
    )


def stop_timeline() -> None:
    """NotImplementedError: see start_timeline."""
    raise NotImplementedError("hvd.stop_timeline(): a timeline ends with the ranks here.")


def resolve_op(op: int | None, average: bool | None) -> int:
    """The reduction that is meant by `op` and the older `average`; the default is Average.

    Raises ValueError if both are given, or for what is no reduction.
    """
    if op is not None and average is not None:
        raise ValueError("op= and average= are two names of one choice. Pass op= alone.")
    if op is None:
        return Average if average is None or average else Sum
    if op not in range(6):
        raise ValueError(f"op={op!r} is none of hvd.Average, Sum, Adasum, Min, Max and Product.")
    return int(op)

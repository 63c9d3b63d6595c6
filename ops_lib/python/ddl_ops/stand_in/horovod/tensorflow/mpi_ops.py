"""The collectives, in graphs, tf.functions and eagerly.

Ranks that differ in what they send raise FailedPreconditionError on every rank, as Horovod's do. A
process that no launcher started is one rank alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from ddl_ops import collectives
from ddl_ops.environment import PLACEMENT
from ddl_ops.loader import device_of_collectives, operations
from tensorflow.python.eager import record

from horovod.common import basics
from horovod.common.basics import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Sum,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
    require_global,
)
from horovod.common.util import num_rank_is_power_2

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

_MISMATCH = "failed_precondition"
_OPS = {Average: "avg", Sum: "sum"}
_NAMES = ["Average", "Sum", "Adasum", "Min", "Max", "Product"]

check_num_rank_power_of_2 = num_rank_is_power_2


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """See basics.resolve_op."""
    return basics.resolve_op(op, average)


def _alone() -> bool:
    """Whether there is nobody to communicate with. ValueError before init()."""
    basics.require_initialized()
    return not PLACEMENT.launched


@contextlib.contextmanager
def _scope(ignored: bool) -> Any:
    """Where ops are made: with `ignored`, as if no name scope were around."""
    with tf.name_scope("") if ignored else contextlib.nullcontext(), device_of_collectives():
        yield


def _op_name(op: int, what: str) -> str:
    if op not in _OPS:
        raise NotImplementedError(
            f"{what} with op=hvd.{_NAMES[op]} is not here yet. hvd.Sum and hvd.Average are; for "
            "others gather what all ranks have (hvd.allgather) and reduce that."
        )
    return _OPS[op]


def scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    """factor * tensor in its own type, computed as Horovod does: integers in float64."""
    if factor == 1.0:
        return tensor
    dtype = tensor.dtype
    if dtype in (tf.float16, tf.bfloat16):
        wide = tf.float32
    else:
        wide = dtype if dtype.is_floating else tf.float64
    return tf.cast(tf.cast(tensor, wide) * tf.constant(factor, wide), dtype)


def _averaged_back(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, whose gradient is that of the average of the ranks' losses.

    That is Horovod's for what is gathered and broadcast, where ours is of their sum.
    """
    recorded = not tf.executing_eagerly() or record.could_possibly_record()
    if not tensor.dtype.is_floating or not recorded:
        return tensor

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: upstream / tf.cast(size(), upstream.dtype)

    return identity(tensor)


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """One dense tensor reduced over the ranks."""
    require_global(process_set, "hvd.allreduce()")
    tensor = scaled(tf.convert_to_tensor(tensor), prescale_factor)
    if _alone():
        return scaled(tf.identity(tensor, name), postscale_factor)
    how = _op_name(op, "hvd.allreduce()")
    with _scope(ignore_name_scope):
        reduced = operations().all_reduce(
            tensor, op=how, mismatch=_MISMATCH, **collectives._identity("hvd.allreduce()", name)
        )
    return scaled(reduced, postscale_factor)


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Dense tensors reduced over the ranks: those of one dtype travel together."""
    require_global(process_set, "hvd.grouped_allreduce()")
    given = [scaled(tf.convert_to_tensor(tensor), prescale_factor) for tensor in tensors]
    if _alone():
        return [scaled(tf.identity(tensor), postscale_factor) for tensor in given]
    how = _op_name(op, "hvd.grouped_allreduce()")
    by_dtype: dict[tf.DType, list[int]] = {}
    for index, tensor in enumerate(given):
        by_dtype.setdefault(tensor.dtype, []).append(index)
    reduced: list[Any] = [None] * len(given)
    previous: list[tf.Tensor] = []
    with _scope(ignore_name_scope):
        for dtype, members in by_dtype.items():
            own = f"{name}_{dtype.name}" if name and len(by_dtype) > 1 else name
            with tf.control_dependencies(previous):
                together = operations().all_reduce_n(
                    [given[index] for index in members],
                    op=how,
                    mismatch=_MISMATCH,
                    **collectives._identity("hvd.grouped_allreduce()", own),
                )
            previous = together[:1]
            for index, one in zip(members, together, strict=True):
                reduced[index] = scaled(one, postscale_factor)
    return reduced


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Joins the ranks' tensors along the first dimension, in which alone they may differ.

    See ddl_ops.collectives.allgather, but for FailedPreconditionError where ranks differ.
    """
    require_global(process_set, "hvd.allgather()")
    tensor = tf.convert_to_tensor(tensor)
    if _alone():
        return tf.identity(tensor, name)
    with _scope(ignore_name_scope):
        return collectives.allgather(_averaged_back(tensor), name, mismatch=_MISMATCH)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """allgather of each, in order."""
    return _one_after_the_other(
        lambda tensor, own: allgather(tensor, own, ignore_name_scope, process_set), tensors, name
    )


def _one_after_the_other(
    collective: Callable[[Any, str | None], tf.Tensor], tensors: Sequence[Any], name: str | None
) -> list[tf.Tensor]:
    done: list[tf.Tensor] = []
    for number, tensor in enumerate(tensors):
        with tf.control_dependencies(done[-1:]):
            done.append(collective(tensor, f"{name}_{number}" if name else None))
    return done


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Rank `root_rank`'s value, on every rank.

    See ddl_ops.collectives.bcast, but for FailedPreconditionError where ranks differ.
    """
    require_global(process_set, "hvd.broadcast()")
    tensor = tf.convert_to_tensor(tensor)
    if _alone():
        return tf.identity(tensor, name)
    with _scope(ignore_name_scope):
        return operations().bcast(
            _averaged_back(tensor),
            root=root_rank,
            mismatch=_MISMATCH,
            **collectives._identity("hvd.broadcast()", name),
        )


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Assigns rank `root_rank`'s values to variables, and returns the values, in order."""

    def assigned(variable: Any, own: str | None) -> tf.Tensor:
        value = broadcast(variable, root_rank, own, process_set=process_set)
        with tf.control_dependencies([variable.assign(value)]):
            return tf.identity(value)

    return _one_after_the_other(assigned, variables, name)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Not here yet: NotImplementedError."""
    raise NotImplementedError(
        "hvd.alltoall() is not here yet: gather what all ranks have (hvd.allgather) and take this "
        "rank's part of it."
    )


def join() -> int:
    """For a rank without data: returns when all have called it, the last rank that did.

    Until then it contributes zeros to what the others reduce; averages are over the ranks that
    have not joined (Horovod's are over all of them). Not for graphs.
    """
    return 0 if _alone() else collectives.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have called it. Not for graphs."""
    require_global(process_set, "hvd.barrier()")
    if not _alone():
        collectives.barrier("hvd.barrier()")


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Number of ranks, an int32 scalar that is known when it runs."""
    require_global(process_set_id, "hvd.size_op()")
    return tf.constant(1, name=name) if _alone() else collectives.size_op(name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set, an int32 scalar."""
    require_global(process_set_id, "hvd.process_set_included_op()")
    return tf.constant(1, name=name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number among all ranks, as size_op."""
    return tf.constant(0, name=name) if _alone() else collectives.rank_op(name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number among the ranks of its host, as size_op."""
    return tf.constant(0, name=name) if _alone() else collectives.local_rank_op(name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Number of ranks of this host, an int32 scalar."""
    basics.require_initialized()
    return tf.constant(PLACEMENT.local_size, name=name)

"""The collectives, in graphs, tf.functions and eagerly.

Ranks that differ in what they send raise FailedPreconditionError on every rank, as Horovod's do. A
process that no launcher started is one rank alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ddl_ops import autograph, collectives, program_order
from ddl_ops.environment import PLACEMENT
from tensorflow.python.eager import record

from horovod.common import basics, elastic
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
    number_of,
    remove_process_set,
    set_of,
)
from horovod.common.util import num_rank_is_power_2
from horovod.tensorflow.util import tensorflow_variable

autograph.leave_alone("horovod")

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

# The error of Horovod where ranks differ.
_MISMATCH: Any = "failed_precondition"
_basics = basics
_OPS: dict[int, Any] = {
    Average: "avg",
    Sum: "sum",
    Min: "min",
    Max: "max",
    Product: "prod",
    Adasum: "adasum",
}

check_num_rank_power_of_2 = num_rank_is_power_2


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """See basics.resolve_op."""
    return basics.resolve_op(op, average)


def _alone() -> bool:
    """Whether there is nobody to communicate with. ValueError before init()."""
    basics.require_initialized()
    return not PLACEMENT.launched


def _scope(ignored: bool) -> contextlib.AbstractContextManager[Any]:
    """Where ops are made: with `ignored`, as if no name scope were around."""
    return tf.name_scope("") if ignored else contextlib.nullcontext()


def _members(process_set: ProcessSet) -> int:
    """Number of the ranks of a set that was added."""
    return process_set.size() or 1


def _how(op: int, what: str, process_set: ProcessSet) -> Any:
    if op == Adasum and not num_rank_is_power_2(_members(process_set)):
        raise NotImplementedError(
            f"{what} with op=hvd.Adasum goes pair by pair: the number of ranks has to be a power "
            f"of two, and is {_members(process_set)}. Start another number, or pass hvd.Average."
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


def _with_gradient_times(factor: float, tensor: tf.Tensor) -> tf.Tensor:
    """What a collective returned, whose gradient is multiplied, and of its type.

    Ours are gradients of the sum of all ranks' losses. Of what is gathered and broadcast Horovod's
    is of their average, and of what is scattered so many times ours as there are ranks.
    """
    recorded = not tf.executing_eagerly() or record.could_possibly_record()
    if not tensor.dtype.is_floating or not recorded or factor == 1.0:
        return tensor

    @tf.custom_gradient
    def identity(x: tf.Tensor) -> Any:
        def gradient(upstream: Any) -> tf.Tensor:
            # Of some of its rows, as tf.gather has it, it is IndexedSlices.
            return tf.cast(tf.convert_to_tensor(upstream), x.dtype) * factor

        return tf.identity(x), gradient

    return identity(tensor)


def _by_dtype(
    collective: Callable[[list[tf.Tensor], str | None], list[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
    name: str | None,
) -> list[tf.Tensor]:
    """The results in order; those of one dtype travel together."""
    members: dict[tf.DType, list[int]] = {}
    for index, tensor in enumerate(tensors):
        members.setdefault(tensor.dtype, []).append(index)
    results: list[Any] = [None] * len(tensors)
    previous: list[tf.Tensor] = []
    for dtype, indices in members.items():
        own = f"{name}_{dtype.name}" if name and len(members) > 1 else name
        with tf.control_dependencies(previous):
            together = collective([tensors[index] for index in indices], own)
        previous = together[:1]
        for index, one in zip(indices, together, strict=True):
            results[index] = one
    return results


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
    group = number_of(process_set)
    how = _how(op, "hvd.allreduce()", process_set)
    tensor = tf.convert_to_tensor(tensor)
    if _alone():
        return scaled(scaled(tf.identity(tensor, name), prescale_factor), postscale_factor)
    with _scope(ignore_name_scope):
        return collectives.allreduce(
            tensor,
            name=name,
            mismatch=_MISMATCH,
            op=how,
            prescale=prescale_factor,
            postscale=postscale_factor,
            process_set=group,
        )


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
    group = number_of(process_set)
    how = _how(op, "hvd.grouped_allreduce()", process_set)
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if _alone():
        return [scaled(scaled(one, prescale_factor), postscale_factor) for one in given]

    def reduced(some: list[tf.Tensor], own: str | None) -> list[tf.Tensor]:
        return collectives.allreduce_n(
            some,
            name=own,
            mismatch=_MISMATCH,
            op=how,
            prescale=prescale_factor,
            postscale=postscale_factor,
            process_set=group,
        )

    with _scope(ignore_name_scope):
        return _by_dtype(reduced, given, name)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Joins the ranks' tensors along the first dimension, in which alone they may differ.

    See ddl_ops.collectives.allgather, but for FailedPreconditionError where ranks differ.
    """
    group = number_of(process_set)
    tensor = tf.convert_to_tensor(tensor)
    if _alone():
        return tf.identity(tensor, name)
    with _scope(ignore_name_scope):
        gathered = collectives.allgather(tensor, name, mismatch=_MISMATCH, process_set=group)
        return _with_gradient_times(1 / _members(process_set), gathered)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """allgather of each, in order; those of one dtype travel together."""
    group = number_of(process_set)
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if _alone():
        return given

    def gathered(some: list[tf.Tensor], own: str | None) -> list[tf.Tensor]:
        return collectives.allgather_n(some, own, mismatch=_MISMATCH, process_set=group)

    with _scope(ignore_name_scope):
        together = _by_dtype(gathered, given, name)
        return [_with_gradient_times(1 / _members(process_set), one) for one in together]


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
    group = number_of(process_set)
    tensor = tf.convert_to_tensor(tensor)
    if _alone():
        return tf.identity(tensor, name)
    with _scope(ignore_name_scope):
        received = collectives.bcast(tensor, name, int(root_rank), _MISMATCH, group)
        return _with_gradient_times(1 / _members(process_set), received)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Assigns rank `root_rank`'s values to variables, and returns the values, in order."""
    group = number_of(process_set)
    variables = [tensorflow_variable(variable) for variable in variables]
    if _alone():
        return [tf.identity(variable) for variable in variables]
    return collectives.bcast_variables(variables, name, int(root_rank), _MISMATCH, group)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of a tensor to each rank.

    Args:
        tensor: [n, d...]; d and dtype are the same on all ranks.
        splits: [ranks]: how many rows go to each; None: equally many.
        name: of the op.
        ignore_name_scope: the name has no name scope in front.
        process_set: the ranks that take part.

    Returns the rows that come from all ranks, in their order; with `splits` also how many come from
    each. See ddl_ops.collectives.alltoall.
    """
    group = number_of(process_set)
    tensor = tf.convert_to_tensor(tensor)
    if _alone():
        received = tf.identity(tensor, name)
        return received if splits is None else (received, tf.convert_to_tensor(splits))
    with _scope(ignore_name_scope):
        received, counts = collectives.alltoall(tensor, splits, name, _MISMATCH, group)
    return received if splits is None else (received, counts)


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """This rank's rows of the reduction of one dense tensor."""
    (mine,) = _grouped_reducescatter(
        [tensor], name, op, ignore_name_scope, process_set, prescale_factor, postscale_factor
    )
    return mine


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """This rank's rows of each reduction; those of one dtype travel together."""
    group = number_of(process_set)
    if op == Adasum:
        raise NotImplementedError(
            "hvd.reducescatter() with op=hvd.Adasum is not there, as in Horovod. Take allreduce."
        )
    how = _how(op, "hvd.reducescatter()", process_set)
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if _alone():
        return [scaled(scaled(one, prescale_factor), postscale_factor) for one in given]

    def scattered(some: list[tf.Tensor], own: str | None) -> list[tf.Tensor]:
        return collectives.reducescatter_n(
            some, how, own, _MISMATCH, prescale_factor, postscale_factor, group
        )

    with _scope(ignore_name_scope):
        together = _by_dtype(scattered, given, name)
        return [_with_gradient_times(float(_members(process_set)), one) for one in together]


def join() -> tf.Tensor:
    """For a rank without data: done when all have joined; an int32 scalar, the last rank that did.

    Until then it contributes zeros to what the others reduce; averages are over the ranks that
    have not joined (Horovod's are over all of them). In graphs it joins whenever it is run.
    """
    if _alone():
        return tf.constant(0)
    if tf.executing_eagerly():
        return tf.constant(_join())
    last = tf.numpy_function(_join_in_op, [], tf.int32)
    last.set_shape([])
    return last


def _join() -> int:
    last = collectives.join()
    elastic.after_join(last)
    return last


def _join_in_op() -> np.int32:
    with program_order.as_main_thread():
        return np.int32(_join())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks of the set have called it. Not for graphs."""
    group = number_of(process_set)
    if not _alone():
        collectives.barrier("hvd.barrier()", process_set=group)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Number of ranks, an int32 scalar; of all ranks known when it runs."""
    if process_set_id or _alone():
        return tf.constant(_members(set_of(process_set_id)), name=name)
    return collectives.size_op(name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set, else 0, an int32 scalar."""
    return tf.constant(int(bool(set_of(process_set_id).included())), name=name)


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


# Gradients of Horovod's own ops, which scripts wrap that register others in their place.
_OF_OPS = ("_allreduce_grad", "_allgather_grad", "_alltoall_grad", "_broadcast_grad")


def __getattr__(name: str) -> Any:
    if name not in _OF_OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    called = name.removeprefix("_").removesuffix("_grad")
    raise ImportError(
        f"{name} is the gradient of Horovod's own op, which is not there with ddl in its place. "
        f"hvd.{called} has a gradient by itself; one of your own is for tf.custom_gradient."
    )

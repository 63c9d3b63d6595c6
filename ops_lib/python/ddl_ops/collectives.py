"""The collectives on tensors, in graphs, tf.functions and eagerly."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf  # noqa: TID253

import ddl_ops.op_gradients  # noqa: F401  for its effect: the ops get gradients
from ddl_ops.environment import PLACEMENT, require_launched
from ddl_ops.lifecycle import initialised
from ddl_ops.loader import device_of_collectives, operations


def _require_initialised(what: str) -> None:
    require_launched(what)
    if not initialised():
        raise RuntimeError(
            f"{what} before ddl.init(). Call ddl.init() first, or set DDL_OPTIONS and import ddl."
        )


def _program_keeps_order() -> bool:
    """Whether ops made here run in the order of the program, so that no rank need ask another.

    So it is in eager code and in tf.functions, but not in a TF1 graph, whose executor starts what
    is ready, nor in a tf.function that such a graph calls.
    """
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def bcast(value: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Returns rank 0's `value` on every rank: any shape, any numeric or bool dtype.

    In a TF1 graph the ranks know bcast, allreduce, allreduce_n and allgather by the names of the
    ops and agree on their order; elsewhere the program has one. The gradient is the sum over the
    ranks on rank 0 and zeros elsewhere. Raises InvalidArgumentError on every rank if shapes or
    dtypes differ, FailedPreconditionError if a rank has left, DeadlineExceededError if one does not
    come within DDL_STALL_TIMEOUT; RuntimeError before init().
    """
    _require_initialised("ddl.bcast()")
    with device_of_collectives():
        return operations().bcast(
            tf.convert_to_tensor(value), ordered=_program_keeps_order(), name=name
        )


def allgather(value: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Joins the ranks' tensors along the first dimension.

    Args:
        value: [n_r, d...], any numeric or bool dtype; n_r may differ by rank and may be 0, d and
            dtype may not.
        name: of the op.

    Returns [sum n_r, d...] in the order of the ranks, on every rank. Its gradient is this rank's
    rows of the sum over the ranks. Raises InvalidArgumentError on every rank for scalars (in graphs
    ValueError), else as bcast. Source: MPI-4.1 section 6.7, MPI_Allgatherv.
    """
    _require_initialised("ddl.allgather()")
    with device_of_collectives():
        return (
            operations()
            .all_gather(tf.convert_to_tensor(value), ordered=_program_keeps_order(), name=name)
            .output
        )


def allreduce(
    value: tf.Tensor | tf.IndexedSlices, average: bool = True, name: str | None = None
) -> tf.Tensor | tf.IndexedSlices:
    """Averages (or sums) a tensor over the ranks.

    Args:
        value: dense: float16, bfloat16, float32, float64, int32 or int64, of one shape on all
            ranks. Or IndexedSlices, whose slices may differ in number and place; the result is
            IndexedSlices too, with the slices of all ranks in their order, divided by their number
            for an average.
        average: integers truncate toward zero.
        name: of the op.

    All ranks get the same bits. Errors as bcast; TypeError for an average of integer IndexedSlices,
    which would be wrong where slices meet: they are added after the division.
    """
    _require_initialised("ddl.allreduce()")
    if isinstance(value, tf.IndexedSlices):
        return _allreduce_slices(value, average, name)
    with device_of_collectives():
        return operations().all_reduce(
            tf.convert_to_tensor(value),
            op="avg" if average else "sum",
            ordered=_program_keeps_order(),
            name=name,
        )


def _allreduce_slices(
    slices: tf.IndexedSlices, average: bool, name: str | None
) -> tf.IndexedSlices:
    if average and not (slices.dtype.is_floating or slices.dtype.is_complex):
        raise TypeError(
            f"ddl cannot average IndexedSlices of {slices.dtype.name}. Pass average=False, or cast "
            "the values to a floating-point type."
        )
    indices = allgather(slices.indices, f"{name}_indices" if name else None)
    with tf.control_dependencies([indices]):
        values = allgather(slices.values, f"{name}_values" if name else None)
    if average:
        values /= tf.cast(PLACEMENT.size, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def size_op(name: str | None = None) -> tf.Tensor:
    """Number of ranks, int32 scalar, known when it runs. FailedPreconditionError before init()."""
    with tf.device("/CPU:0"):
        return operations().ddl_size(name=name)


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number among all ranks, as size_op."""
    with tf.device("/CPU:0"):
        return operations().ddl_rank(name=name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number among the ranks of its host, as size_op."""
    with tf.device("/CPU:0"):
        return operations().ddl_local_rank(name=name)


def allreduce_n(
    tensors: Sequence[tf.Tensor], average: bool = True, name: str | None = None
) -> list[tf.Tensor]:
    """Averages (or sums) each tensor over the ranks; returns them in order.

    All ranks get the same bits. Tensors are float16, bfloat16, float32, float64, int32 or int64,
    all of one dtype, of any shapes. The halves are added as float32 and rounded once; integer
    averages truncate toward zero. All tensors travel together, so many small ones cost little more
    than one. Errors as bcast; ValueError if dtypes are mixed.
    """
    _require_initialised("ddl.allreduce_n()")
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    dtypes = sorted({tensor.dtype.name for tensor in tensors})
    if len(dtypes) > 1:
        raise ValueError(
            f"ddl.allreduce_n() got tensors of {', '.join(dtypes)}. Pass one dtype in each call."
        )
    with device_of_collectives():
        return list(
            operations().all_reduce_n(
                tensors,
                op="avg" if average else "sum",
                ordered=_program_keeps_order(),
                name=name,
            )
        )

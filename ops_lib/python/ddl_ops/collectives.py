"""The collectives on tensors, in graphs, tf.functions and eagerly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf  # noqa: TID253

import ddl_ops.op_gradients  # noqa: F401  for its effect: the ops get gradients
from ddl_ops import arrays, preemption
from ddl_ops.environment import require_launched
from ddl_ops.lifecycle import initialised
from ddl_ops.loader import device_of_collectives, operations
from ddl_ops.program_order import keeps_order, stream


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


def _identity(what: str, name: str | None) -> dict[str, Any]:
    """The attributes by which the ranks know an op that is made here."""
    if not _program_keeps_order():
        return {"name": name}
    if not tf.executing_eagerly():  # a tf.function keeps the order of its ops, whoever runs it
        return {"name": name, "ordered": True, "stream": stream(what)}
    if not keeps_order(name):
        return {"name": name, "request": name}
    return {"name": name, "request": name or "", "ordered": True, "stream": stream(what)}


def bcast(value: tf.Tensor, name: str | None = None, root: int = 0) -> tf.Tensor:
    """Returns rank `root`'s `value` on every rank: any shape, any numeric or bool dtype.

    In a TF1 graph the ranks know bcast, allreduce, allreduce_n and allgather by the names of the
    ops and agree on their order; elsewhere the program has one, each of its threads for itself:
    threads need names, or their collectives do (see ddl_ops.program_order). The gradient is the sum
    over the ranks on `root` and zeros elsewhere. Raises InvalidArgumentError on every rank if
    shapes, dtypes or roots differ; FailedPreconditionError if a rank has left, or has given up the
    step that this is part of; DeadlineExceededError if one does not come within DDL_STALL_TIMEOUT;
    RuntimeError before init().
    """
    _require_initialised("ddl.bcast()")
    with device_of_collectives():
        return operations().bcast(
            tf.convert_to_tensor(value), root=root, **_identity("ddl.bcast()", name)
        )


def allgather(
    value: tf.Tensor, name: str | None = None, mismatch: str = "invalid_argument"
) -> tf.Tensor:
    """Joins the ranks' tensors along the first dimension.

    Args:
        value: [n_r, d...], any numeric or bool dtype; n_r may differ by rank and may be 0, d and
            dtype may not.
        name: of the op.
        mismatch: "failed_precondition": the error is that, instead of InvalidArgumentError.

    Returns [sum n_r, d...] in the order of the ranks, on every rank. Its gradient is this rank's
    rows of the sum over the ranks. Raises InvalidArgumentError on every rank for scalars (in graphs
    ValueError), else as bcast. Source: MPI-4.1 section 6.7, MPI_Allgatherv.
    """
    _require_initialised("ddl.allgather()")
    with device_of_collectives():
        return (
            operations()
            .all_gather(
                tf.convert_to_tensor(value),
                mismatch=mismatch,
                **_identity("ddl.allgather()", name),
            )
            .output
        )


def allreduce(
    value: tf.Tensor | tf.IndexedSlices,
    average: bool = True,
    name: str | None = None,
    mismatch: str = "invalid_argument",
) -> tf.Tensor | tf.IndexedSlices:
    """Averages (or sums) a tensor over the ranks.

    Args:
        value: dense: float16, bfloat16, float32, float64, int32 or int64, of one shape on all
            ranks. Or IndexedSlices, whose slices may differ in number and place; the result is
            IndexedSlices too, with the slices of all ranks in their order, divided by their number
            for an average.
        average: integers truncate toward zero.
        name: of the op.
        mismatch: of a dense tensor, see allgather.

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
            mismatch=mismatch,
            **_identity("ddl.allreduce()", name),
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
        with tf.control_dependencies([values]):
            values /= tf.cast(contributors(f"{name}_contributors" if name else None), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def contributors(name: str | None = None) -> tf.Tensor:
    """How many ranks have not joined, a float32 scalar. Collective: joined ranks add zeros."""
    total = allreduce(tf.constant(1.0), average=False, name=name)
    assert isinstance(total, tf.Tensor)
    return total


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
    tensors: Sequence[tf.Tensor],
    average: bool = True,
    name: str | None = None,
    step: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Averages (or sums) each tensor over the ranks; returns them in order.

    Args:
        tensors: see below.
        average: integers truncate toward zero.
        name: of the op.
        step: of the training, an int64 scalar from 0. Ranks that are at different ones get an
            InvalidArgumentError instead of an average of different steps.

    All ranks get the same bits. The tensors are float16, bfloat16, float32, float64, int32 or
    int64, all of one dtype, of any shapes. The halves are added as float32 and rounded once, or
    twice where several hosts have several ranks each. All
    tensors travel together, so many small ones cost little more than one. Errors as bcast;
    ValueError if dtypes are mixed.
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
    identity = _identity("ddl.allreduce_n()", name)
    op = "avg" if average else "sum"
    with device_of_collectives():
        if step is None:
            return list(operations().all_reduce_n(tensors, op=op, **identity))
        return list(operations().all_reduce_at_step(step, tensors, op=op, **identity))


def barrier(name: str, hint: str = "") -> None:
    """Waits until all ranks are at the barrier of that name. Not for graphs.

    Args:
        name: what all ranks must have in common here, as "the end of epoch 3 after 100 steps".
        hint: a sentence on what to do where a rank is at something else.

    Raises InvalidArgumentError on every rank, which names both, if ranks are at different things;
    RuntimeError before init(), or if a rank has left or does not come.
    """
    _require_initialised("ddl.barrier()")
    try:
        arrays.barrier(name, hint)
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from None


def join() -> int:
    """For a rank without data: contributes zeros until all ranks have joined. Not for graphs.

    See ddl_ops.arrays.join, whose result and errors these are. Raises SystemExit where the others
    were asked to end meanwhile (ddl_ops.preemption).
    """
    _require_initialised("ddl.join()")
    last = arrays.join()
    preemption.after_join(last)
    return last

"""The gradients of the ops: most are linear in their input, so the gradient is the transpose.

Every rank has a loss of its own; the gradient is that of the sum of all of them. A gradient is a
collective as its op is: either all ranks ask for it or none. Imported for its effect, once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf  # noqa: TID253

from ddl_ops.loader import device_of_collectives, operations
from ddl_ops.program_order import stream

for _name in ("Init", "AllReduceAtStep", "DdlSize", "DdlRank", "DdlLocalRank"):
    tf.no_gradient(_name)


def _rank(op: tf.Operation) -> tf.Tensor:
    """Among the ranks that take part in `op`."""
    with tf.device("/CPU:0"):
        return operations().ddl_rank(process_set=op.get_attr("process_set"))


def _order(op: tf.Operation) -> dict[str, Any]:
    """Attributes of a collective of the gradient of `op`."""
    return {"process_set": op.get_attr("process_set"), **_place_in_order()}


def _device(op: tf.Operation) -> contextlib.AbstractContextManager[object]:
    return device_of_collectives(op.get_attr("process_set"))


def _place_in_order() -> dict[str, Any]:
    # Eagerly they run in the order of the tape. In graphs nothing orders them: TensorFlow orders
    # the ops of a tf.function, but not their gradients.
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return {}
    thread = stream("a gradient of a collective")
    return {"ordered": tf.executing_eagerly(), "stream": thread}


def _all_reduce(op: tf.Operation, upstream: tf.Tensor, how: str = "sum") -> tf.Tensor:
    with _device(op):
        return operations().all_reduce(upstream, op=how, **_order(op))


def _sum_over_ranks(op: tf.Operation, upstream: tf.Tensor) -> tf.Tensor:
    if not upstream.dtype.is_complex:
        return _all_reduce(op, upstream)
    # The ops add real numbers only.
    total = _all_reduce(op, tf.stack([tf.math.real(upstream), tf.math.imag(upstream)]))
    return tf.complex(total[0], total[1])


def _all_reduce_n(
    op: tf.Operation, upstreams: Sequence[tf.Tensor], how: str = "sum"
) -> list[tf.Tensor]:
    with _device(op):
        return list(operations().all_reduce_n(list(upstreams), op=how, **_order(op)))


def _sums_over_ranks(op: tf.Operation, upstreams: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    if not upstreams[0].dtype.is_complex:
        return _all_reduce_n(op, upstreams)
    totals = _all_reduce_n(op, [tf.stack([tf.math.real(x), tf.math.imag(x)]) for x in upstreams])
    return [tf.complex(total[0], total[1]) for total in totals]


def _linear_or_extreme(op: tf.Operation) -> str:
    """The op's way to reduce. Raises LookupError for a product, and for adasum."""
    how: str = op.get_attr("op").decode()
    if how in ("prod", "adasum"):
        raise LookupError(
            f"{op.type} has no gradient for op={how}. Sum (logarithms, for a product), or take "
            "tf.stop_gradient."
        )
    return how


@tf.RegisterGradient("Bcast")
def _bcast_gradient(op: tf.Operation, upstream: tf.Tensor) -> tf.Tensor:
    """The sum over the ranks on the root, whose value went to all; zeros elsewhere."""
    total = _sum_over_ranks(op, upstream)
    # Chosen when it runs, from the total: were it not needed, TensorFlow would not run the sum on
    # the other ranks, and the root would wait for them.
    return tf.where(tf.equal(_rank(op), op.get_attr("root")), total, tf.zeros_like(total))


@tf.RegisterGradient("BcastN")
def _bcast_n_gradient(op: tf.Operation, *upstreams: tf.Tensor) -> Sequence[tf.Tensor]:
    """As of Bcast, all in one go."""
    totals = _sums_over_ranks(op, upstreams)
    is_root = tf.equal(_rank(op), op.get_attr("root"))
    return [tf.where(is_root, total, tf.zeros_like(total)) for total in totals]


def _extreme_gradient(
    op: tf.Operation, mine: tf.Tensor, extreme: tf.Tensor, upstream: tf.Tensor
) -> tf.Tensor:
    """The sum over the ranks, in equal parts to those that have the smallest (largest)."""
    has = tf.cast(tf.equal(mine, extreme), upstream.dtype)
    total, count = _sums_over_ranks(op, [upstream, has])
    return total * has / count


@tf.RegisterGradient("AllReduce")
def _allreduce_gradient(op: tf.Operation, upstream: tf.Tensor) -> tf.Tensor:
    """The sum (average) over the ranks, as in the op; of a minimum or maximum as tf.reduce_min."""
    how = _linear_or_extreme(op)
    if how in ("min", "max"):
        return _extreme_gradient(op, op.inputs[0], op.outputs[0], upstream)
    return _all_reduce(op, upstream, how)


@tf.RegisterGradient("AllReduceN")
def _allreduce_n_gradient(op: tf.Operation, *upstreams: tf.Tensor) -> Sequence[tf.Tensor]:
    """As of AllReduce, all in one go as in the op."""
    how = _linear_or_extreme(op)
    if how not in ("min", "max"):
        return _all_reduce_n(op, upstreams, how)
    found: list[tf.Tensor] = []
    for mine, extreme, upstream in zip(op.inputs, op.outputs, upstreams, strict=True):
        with tf.control_dependencies(found[-1:]):  # collectives in one order
            found.append(_extreme_gradient(op, mine, extreme, upstream))
    return found


@tf.RegisterGradient("ReduceScatterN")
def _reduce_scatter_n_gradient(op: tf.Operation, *upstreams: tf.Tensor) -> Sequence[tf.Tensor]:
    """The rows of all ranks, joined; for an average divided by their number."""
    how = _linear_or_extreme(op)
    if how in ("min", "max"):
        raise LookupError(f"ReduceScatterN has no gradient for op={how}. Use allreduce.")
    with _device(op):
        joined = operations().all_gather_n(list(upstreams), **_order(op)).output
    if how == "sum":
        return joined
    with tf.device("/CPU:0"):
        ranks = operations().ddl_size(process_set=op.get_attr("process_set"))
    return [one / tf.cast(ranks, one.dtype) for one in joined]


@tf.RegisterGradient("DdlAllToAll")
def _all_to_all_gradient(
    op: tf.Operation, upstream: tf.Tensor, splits_upstream: tf.Tensor | None
) -> tuple[tf.Tensor, None]:
    """The rows go back to where they came from."""
    del splits_upstream  # of integers: there is none
    with _device(op):
        return operations().ddl_all_to_all(upstream, op.outputs[1], **_order(op)).output, None


@tf.RegisterGradient("AllGather")
def _allgather_gradient(
    op: tf.Operation, upstream: tf.Tensor, sizes_upstream: tf.Tensor | None
) -> tf.Tensor:
    """This rank's rows of the sum over the ranks."""
    del sizes_upstream  # of integers: there is none
    rank = _rank(op)
    sizes = op.outputs[1]
    first = tf.reduce_sum(sizes[:rank])
    return _sum_over_ranks(op, upstream)[first : first + sizes[rank]]


@tf.RegisterGradient("AllGatherN")
def _allgather_n_gradient(op: tf.Operation, *upstreams: tf.Tensor) -> Sequence[tf.Tensor]:
    """As of AllGather, all in one go."""
    rank = _rank(op)
    found = []
    for sizes, total in zip(
        tf.unstack(op.outputs[-1], num=len(op.inputs)),
        _sums_over_ranks(op, upstreams[:-1]),
        strict=True,
    ):
        first = tf.reduce_sum(sizes[:rank])
        found.append(total[first : first + sizes[rank]])
    return found

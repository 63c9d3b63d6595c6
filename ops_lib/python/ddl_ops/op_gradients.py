"""The gradients of the ops: each is linear in its input, so each gradient is its transpose.

Every rank has a loss of its own; the gradient is that of the sum of all of them. A gradient is a
collective as its op is: either all ranks ask for it or none. Imported for its effect, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf  # noqa: TID253

from ddl_ops.loader import device_of_collectives, operations
from ddl_ops.program_order import stream

for _name in ("Init", "AllReduceAtStep", "DdlSize", "DdlRank", "DdlLocalRank"):
    tf.no_gradient(_name)


def _rank() -> tf.Tensor:
    with tf.device("/CPU:0"):
        return operations().ddl_rank()


def _order() -> dict[str, Any]:
    # Eagerly they run in the order of the tape. In graphs nothing orders them: TensorFlow orders
    # the ops of a tf.function, but not their gradients.
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return {}
    thread = stream("a gradient of a collective")
    return {"ordered": tf.executing_eagerly(), "stream": thread}


def _all_reduce(upstream: tf.Tensor, op: str = "sum") -> tf.Tensor:
    with device_of_collectives():
        return operations().all_reduce(upstream, op=op, **_order())


def _sum_over_ranks(upstream: tf.Tensor) -> tf.Tensor:
    if not upstream.dtype.is_complex:
        return _all_reduce(upstream)
    # The ops add real numbers only.
    total = _all_reduce(tf.stack([tf.math.real(upstream), tf.math.imag(upstream)]))
    return tf.complex(total[0], total[1])


@tf.RegisterGradient("Bcast")
def _bcast_gradient(op: tf.Operation, upstream: tf.Tensor) -> tf.Tensor:
    """The sum over the ranks on the root, whose value went to all; zeros elsewhere."""
    total = _sum_over_ranks(upstream)
    # Chosen when it runs, from the total: were it not needed, TensorFlow would not run the sum on
    # the other ranks, and the root would wait for them.
    return tf.where(tf.equal(_rank(), op.get_attr("root")), total, tf.zeros_like(total))


@tf.RegisterGradient("AllReduce")
def _allreduce_gradient(op: tf.Operation, upstream: tf.Tensor) -> tf.Tensor:
    """The sum (average) over the ranks, as in the op."""
    return _all_reduce(upstream, op.get_attr("op").decode())


@tf.RegisterGradient("AllReduceN")
def _allreduce_n_gradient(op: tf.Operation, *upstreams: tf.Tensor) -> Sequence[tf.Tensor]:
    """The sum (average) over the ranks of each, all in one go as in the op."""
    with device_of_collectives():
        return operations().all_reduce_n(list(upstreams), op=op.get_attr("op").decode(), **_order())


@tf.RegisterGradient("AllGather")
def _allgather_gradient(
    op: tf.Operation, upstream: tf.Tensor, sizes_upstream: tf.Tensor | None
) -> tf.Tensor:
    """This rank's rows of the sum over the ranks."""
    del sizes_upstream  # of integers: there is none
    rank = _rank()
    sizes = op.outputs[1]
    first = tf.reduce_sum(sizes[:rank])
    return _sum_over_ranks(upstream)[first : first + sizes[rank]]

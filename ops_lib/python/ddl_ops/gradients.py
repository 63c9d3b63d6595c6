"""Averaging of gradients over the ranks, in groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf  # noqa: TID253

from ddl_ops.collectives import allreduce_n
from ddl_ops.environment import PLACEMENT, group_size

# The ops add in these types; half precision travels as float32, which also keeps its sum exact.
_REDUCED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}


def split_into_groups(counts: Sequence[int], limit: int | None) -> list[list[int]]:
    """Cuts the indices of `counts` (elements) into runs of at most `limit` elements together.

    From the last to the first: the gradients of the last layers are ready first. An index above
    the limit is a group of its own. None: one group.
    """
    groups: list[list[int]] = []
    room = 0
    for index in reversed(range(len(counts))):
        if not groups or (limit is not None and counts[index] > room):
            groups.append([])
            room = limit or 0
        groups[-1].append(index)
        room -= counts[index]
    return groups


def reduce_gradients(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    average: bool = True,
    name: str = "ddl_gradients",
) -> list[tf.Tensor | None]:
    """Averages (or sums) gradients over the ranks; returns them in order.

    None stays None, and must be None on every rank. IndexedSlices become dense tensors: their
    indices differ between ranks. float16 and bfloat16 are summed as float32. Gradients of one dtype
    are reduced by one AllReduceN, or by several of about DDL_GROUP_SIZE elements, each after the
    one before it. Errors as allreduce_n.
    """
    if PLACEMENT.size == 1 and not PLACEMENT.launched:
        return list(gradients)
    reduced: list[tf.Tensor | None] = [None] * len(gradients)
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    dense = {i: tf.convert_to_tensor(gradients[i]) for i in present}
    by_dtype: dict[tf.DType, list[int]] = {}
    for i in present:
        by_dtype.setdefault(_REDUCED_AS.get(dense[i].dtype, dense[i].dtype), []).append(i)
    previous: list[tf.Tensor] = []
    number = 0
    for dtype, members in by_dtype.items():
        counts = [dense[i].shape.num_elements() or 0 for i in members]
        for group in split_into_groups(counts, group_size()):
            indices = [members[position] for position in group]
            with tf.control_dependencies(previous):
                sums = allreduce_n(
                    [tf.cast(dense[i], dtype) for i in indices], average, f"{name}_{number}"
                )
            previous = sums[:1]
            number += 1
            for i, total in zip(indices, sums, strict=True):
                reduced[i] = tf.cast(total, dense[i].dtype)
    return reduced


def grads_reduce(
    grads_and_vars: Iterable[tuple[Any, Any]], average: bool = True
) -> list[tuple[Any, Any]]:
    """reduce_gradients for (gradient, variable) pairs, as optimizers compute and apply them."""
    pairs = list(grads_and_vars)
    reduced = reduce_gradients([gradient for gradient, _ in pairs], average)
    return [(gradient, variable) for gradient, (_, variable) in zip(reduced, pairs, strict=True)]

"""What dl_comm does with tensors, in graphs of TensorFlow 1. Importing this imports TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf  # noqa: TID253

from ddl_ops import collectives
from ddl_ops.environment import PLACEMENT
from ddl_ops.gradients import note_explicit_averages, reduce_gradients
from ddl_ops.loader import operations

v1 = tf.compat.v1


def gradients(grads: Sequence[Any], team: int) -> list[Any]:
    """The averages that a step of `team` applies. See dl_comm.gradients.

    DDL_GROUP_SIZE and DDL_WIRE_DTYPE apply. Raises RuntimeError outside of a graph. What the team
    or msglen has against it is an error when it runs: FailedPreconditionError without init or
    config_team, InvalidArgumentError for too many elements or a mismatch.
    """
    if v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            "dl_comm.gradients() makes ops of a TensorFlow 1 graph. Start the script with "
            "ddl-run --tf1, build it in a tf.Graph, or use ddl.grads_reduce() in eager code."
        )
    if not PLACEMENT.launched:
        return list(grads)
    note_explicit_averages("dl_comm.gradients()")
    reduced = reduce_gradients(
        [_own_memory(value) for value in grads],
        name="dl_comm_gradients",
        sparse_as_dense=True,
        reduce_n=functools.partial(_team_gradients, team=team),
    )
    return list(reduced)


def _own_memory(value: Any) -> Any:
    """A variable's value where a later assignment does not change it while it is communicated."""
    if value is None or isinstance(value, (tf.Tensor, tf.IndexedSlices)):
        return value
    return tf.raw_ops.DeepCopy(x=tf.convert_to_tensor(value))


def _team_gradients(
    tensors: Sequence[tf.Tensor], average: bool, name: str, team: int
) -> list[tf.Tensor]:
    del average  # a team does nothing else
    with tf.device("/CPU:0"):
        return list(operations().team_gradients(list(tensors), team=team, name=name))


def broadcast(values: Sequence[Any], root: int) -> list[tf.Tensor]:
    """Rank `root`'s values on every rank. Errors as ddl_ops.collectives.bcast."""
    received: list[tf.Tensor] = []
    for number, value in enumerate(values):
        # One after the other, so that no order has to be agreed on.
        with tf.control_dependencies(received[-1:]):
            received.append(collectives.bcast(value, f"dl_comm_broadcast_{number}", root))
    return received

"""Rank 0's values of all variables of a TensorFlow 1 graph, on every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod.tensorflow.functions import broadcast_variables

v1 = tf.compat.v1


def broadcast_global_variables(root_rank: int) -> Any:
    """An op that gives all global variables of this graph rank `root_rank`'s values.

    Raises RuntimeError in eager code, which has no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "Eager code has no global variables. Name them: "
            "hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)."
        )
    return broadcast_variables(v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(v1.train.SessionRunHook):
    """For hooks= of a session: when it begins, all ranks get rank `root_rank`'s variables.

    Args:
        root_rank: whose.
        device: has no effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.bcast_op: Any = None

    def begin(self) -> None:
        """A session begins, and its graph can still be added to."""
        if self.bcast_op is None or self.bcast_op.graph is not v1.get_default_graph():
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Its variables have their values."""
        del coord
        session.run(self.bcast_op)

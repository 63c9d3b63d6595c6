"""Collectives on whatever a tensor can be made of.

Eagerly a tensor comes back; in a graph of TensorFlow 1 Keras's session runs the op, and what it
gives comes back: NumPy.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from horovod._keras.callbacks import evaluated
from horovod.common.basics import Average
from horovod.tensorflow import initial_values, mpi_ops, reductions
from horovod.tensorflow.compression import Compression


def _now(tensor: Any) -> Any:
    return tensor if tf.executing_eagerly() else evaluated(tensor)


def broadcast_global_variables(root_rank: int) -> None:
    """Gives all global variables of this graph rank `root_rank`'s values, in Keras's session.

    Raises RuntimeError in eager code, which has no global variables.
    """
    evaluated(initial_values.broadcast_global_variables(root_rank))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """A tensor-compatible value reduced over the ranks; hvd.Average by default."""
    if op is not None:
        average = None
    return _now(
        reductions.allreduce(
            tf.constant(value, name=name),
            average=average,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            compression=compression,
        )
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Tensor-compatible values of all ranks joined along the first dimension."""
    return _now(mpi_ops.allgather(tf.constant(value, name=name)))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Rank `root_rank`'s tensor-compatible value."""
    return _now(mpi_ops.broadcast(tf.constant(value, name=name), root_rank))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """As that of horovod.tensorflow, of a tensor-compatible value."""
    return _now(reductions.reducescatter(tf.constant(value, name=name), op=op))

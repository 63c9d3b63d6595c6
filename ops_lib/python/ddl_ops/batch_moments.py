"""Batch normalization by the moments of the batches of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf  # noqa: TID253

from ddl_ops.collectives import allreduce
from ddl_ops.environment import PLACEMENT
from ddl_ops.gradients import name_in_order
from ddl_ops.lifecycle import initialised


def over_ranks(
    mean: Any, variance: Any, name: str, average: Callable[..., Any] = allreduce
) -> tuple[Any, Any]:
    """Moments of all ranks' batches, which count equally, from those of this rank's.

    Args:
        mean: of this rank's batch.
        variance: of this rank's batch.
        name: of the collectives, without what a layer adds.
        average: over the ranks, of a tensor and its name. Not one that takes tensors as large as
            gradients for these: ranks that average none would train apart unseen.
    """
    # By their names alone they would be another layer's, too, that a thread trains beside it.
    of_all = average(mean, name=name_in_order(f"{name}.mean"))
    # Not by the mean of the squares, in which a small variance of large values is lost.
    variance += tf.square(mean - of_all)
    return of_all, average(variance, name=name_in_order(f"{name}.variance"))


@functools.cache
def hook_batch_normalization() -> None:
    """Lets Keras 3's BatchNormalization(synchronized=True) do as it says: on all ranks.

    By itself it asks tf.distribute, which knows of no ranks.
    """
    import keras

    kind: Any = keras.layers.BatchNormalization
    moments = kind._moments

    @functools.wraps(moments)
    def synchronized(self: Any, inputs: Any, mask: Any) -> Any:
        mean, variance = moments(self, inputs, mask)
        if not self.synchronized or PLACEMENT.size == 1 or not initialised():
            return mean, variance
        return over_ranks(mean, variance, "BatchNormalization")

    kind._moments = synchronized

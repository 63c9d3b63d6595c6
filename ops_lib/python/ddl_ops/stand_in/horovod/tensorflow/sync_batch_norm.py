"""Batch normalization by the moments of the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from ddl_ops.gradients import name_in_order

from horovod.common.basics import Average, size
from horovod.tensorflow.mpi_ops import _allreduce


def _over_ranks(mean: Any, variance: Any) -> tuple[Any, Any]:
    """Moments of all ranks' batches, which count equally, from those of this rank's."""
    if size() == 1:
        return mean, variance
    # hvd.allreduce() would take them for gradients, which are as large: ranks that average none
    # would train apart unseen. By their names alone they would be another layer's, too, that a
    # thread trains beside it.
    name = name_in_order("SyncBatchNormalization.mean")
    of_all = _allreduce(mean, op=Average, name=name)
    # Not by the mean of the squares, in which a small variance of large values is lost.
    variance += tf.square(mean - of_all)
    name = name_in_order("SyncBatchNormalization.variance")
    return of_all, _allreduce(variance, op=Average, name=name)


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """tf.keras.layers.BatchNormalization whose moments are those of all ranks' batches.

    Args:
        fused: False: moments of several ranks cannot be fused.
        options: as BatchNormalization's.
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused in (True, None):
            raise ValueError("Moments of several ranks cannot be fused: leave out fused=.")
        if tf.keras.__name__.startswith("keras"):  # Keras 3 has no such option
            super().__init__(**options)
        else:
            super().__init__(fused=False, **options)

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return _over_ranks(*super()._moments(inputs, *args, **kwargs))

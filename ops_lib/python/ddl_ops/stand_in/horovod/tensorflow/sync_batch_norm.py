"""Batch normalization by the moments of the batches of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from ddl_ops.batch_moments import over_ranks

from horovod.common.basics import Average, size
from horovod.tensorflow.mpi_ops import _allreduce


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
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if size() == 1:
            return mean, variance
        average = functools.partial(_allreduce, op=Average)
        return over_ranks(mean, variance, "SyncBatchNormalization", average)

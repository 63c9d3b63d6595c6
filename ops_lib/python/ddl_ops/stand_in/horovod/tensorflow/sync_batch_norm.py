"""Batch normalization by the moments of the batches of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from ddl_ops.batch_moments import over_ranks

from horovod.common.basics import Average, size
from horovod.tensorflow.mpi_ops import _allreduce

v1 = tf.compat.v1


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

    def add_update(self, *args: Any, **kwargs: Any) -> None:
        """As that of Keras 2. Graphs of TensorFlow 1 have its updates in UPDATE_OPS as well."""
        super().add_update(*args, **kwargs)
        graph = v1.get_default_graph()
        if not tf.executing_eagerly() and not graph.building_function:
            known = graph.get_collection_ref(v1.GraphKeys.UPDATE_OPS)
            known += [one for one in self.updates if one not in known]

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if size() == 1:
            return mean, variance
        average = functools.partial(_allreduce, op=Average)
        return over_ranks(mean, variance, "SyncBatchNormalization", average)

"""State of a Keras model that is committed, and gone on from after a restart."""

from __future__ import annotations

import keras

from horovod._keras.elastic import KerasState, callbacks_of
from horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

CommitStateCallback, UpdateBatchStateCallback, UpdateEpochStateCallback = callbacks_of(
    keras, __name__
)

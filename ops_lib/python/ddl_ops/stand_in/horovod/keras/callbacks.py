"""Callbacks for `import keras`; models of an older tf.keras take them, too."""

from __future__ import annotations

import keras

from horovod._keras.callbacks import callbacks_of

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

(
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
) = callbacks_of(keras, __name__)

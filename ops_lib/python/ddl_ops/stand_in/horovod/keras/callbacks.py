"""Callbacks for Keras 3."""

from __future__ import annotations

import keras

from horovod._keras import callbacks as _impl

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(_impl.BroadcastGlobalVariables, keras.callbacks.Callback):
    __doc__ = _impl.BroadcastGlobalVariables.__doc__


class MetricAverageCallback(_impl.MetricAverage, keras.callbacks.Callback):
    __doc__ = _impl.MetricAverage.__doc__


class LearningRateScheduleCallback(_impl.LearningRateSchedule, keras.callbacks.Callback):
    __doc__ = _impl.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(_impl.LearningRateWarmup, keras.callbacks.Callback):
    __doc__ = _impl.LearningRateWarmup.__doc__


class BestModelCheckpoint(_impl.BestModel, keras.callbacks.ModelCheckpoint):
    __doc__ = _impl.BestModel.__doc__

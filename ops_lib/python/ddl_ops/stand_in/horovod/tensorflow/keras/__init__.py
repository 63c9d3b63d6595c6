"""Horovod's interface for tf.keras: see docs/coming-from-horovod.md."""

from __future__ import annotations

from tensorflow import keras

from horovod._keras import interface as _interface
from horovod._keras import load as _load
from horovod._keras.interface import *  # noqa: F403
from horovod.tensorflow.keras import callbacks, elastic

__all__ = [*_interface.__all__, "callbacks", "elastic", "load_model"]

load_model = _load.load_model_of(keras)

"""Horovod's interface for `import keras`, and for tf.keras where that is an older one.

See docs/coming-from-horovod.md.
"""

from __future__ import annotations

import keras

from horovod._keras import interface as _interface
from horovod._keras import load as _load
from horovod._keras.interface import *  # noqa: F403
from horovod.keras import callbacks, elastic

__all__ = [*_interface.__all__, "callbacks", "elastic", "load_model"]

load_model = _load.load_model_of(keras)

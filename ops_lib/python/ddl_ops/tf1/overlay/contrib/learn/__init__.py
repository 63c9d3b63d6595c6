"""tensorflow.contrib.learn: Experiment and what it needs, over tf.estimator, which it became.

The code is in the modules of its old places, ``python/learn``.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.contrib.learn.python.learn import *

from ddl_ops.tf1 import gone


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason = gone.left(f"tensorflow.contrib.learn.{name}")
    if hasattr(tf.estimator, name):
        reason = (
            f"tensorflow.contrib.learn.{name} is gone from TensorFlow. Use tf.estimator.{name}."
        )
    raise gone.LeftTensorFlow(reason)

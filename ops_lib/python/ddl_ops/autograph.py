"""Keeps AutoGraph off this project's own functions.

What a tf.function calls AutoGraph reads, rewrites and compiles, function by function, for loops and
conditions on tensors. Ours have none: it would cost the first step of a script a second or more on
each rank, and a warning for each that it cannot read.
"""

from __future__ import annotations

from tensorflow.python.autograph.core import config  # noqa: TID253  there is no public way


def leave_alone(*packages: str) -> None:
    """From here on functions of these packages are called as they are written.

    As TensorFlow does for itself, Keras and NumPy; the public do_not_convert would be needed on
    every function and method that a script may call.
    """
    rules = tuple(config.DoNotConvert(package) for package in packages)
    config.CONVERSION_RULES = (*rules, *config.CONVERSION_RULES)

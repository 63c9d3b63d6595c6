"""Small things that scripts and tests import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config as autograph

# In a tf.function these modules run as they are written: Python's `if` is none of the graph's.
if not any(rule.matches("horovod.tensorflow") for rule in autograph.CONVERSION_RULES):
    autograph.CONVERSION_RULES = (autograph.DoNotConvert("horovod"), *autograph.CONVERSION_RULES)


def _executing_eagerly() -> bool:
    """Whether ops run at once, where this is called."""
    return bool(tf.executing_eagerly())


def vars_to_refs(vars: Any) -> Any:
    """Keys for variables, one by one, or in tuples."""
    if isinstance(vars, list):
        return tuple(vars_to_refs(one) for one in vars)
    return vars.ref() if hasattr(vars, "ref") else vars


def refs_to_vars(refs: Any) -> Any:
    """The variables of such keys."""
    if isinstance(refs, (list, tuple)):
        return [refs_to_vars(one) for one in refs]
    return refs.deref() if hasattr(refs, "deref") else refs


def tensorflow_variable(variable: Any) -> Any:
    """That of a Keras 3 variable; another as it is."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def key_of(variable: Any) -> Any:
    """What tells a variable from another: Keras 3 may give a variable, or the one within it."""
    inner = tensorflow_variable(variable)
    return inner.ref() if hasattr(inner, "ref") else id(inner)


def keys_of(variables: Sequence[Any]) -> set[Any]:
    """key_of each."""
    return {key_of(variable) for variable in variables}

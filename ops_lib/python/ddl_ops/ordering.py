"""One order of collectives on all ranks, in graphs whose executor has none."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import tensorflow as tf  # noqa: TID253

Result = TypeVar("Result", tf.Tensor, list[tf.Tensor])
_Chain = weakref.WeakKeyDictionary[tf.Graph, tf.Operation]

# The last collective of each TF1 graph, and the last one in the gradients of each graph.
_last_call: _Chain = weakref.WeakKeyDictionary()
_last_gradient: _Chain = weakref.WeakKeyDictionary()


def after_last_call(make: Callable[[], tf.Tensor]) -> tf.Tensor:
    """What `make` returns, a collective, after the one before it if this is a TF1 graph.

    Eager code and tf.functions keep the order of a program by themselves.
    """
    if tf.executing_eagerly() or isinstance(
        tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph
    ):
        return make()
    return _in_turn(_last_call, make)


def after_last_gradient(make: Callable[[], Result]) -> Result:
    """What `make` returns, a collective in a gradient, after those made before it in this graph.

    In every kind of graph: TensorFlow orders the ops of a tf.function, but not their gradients.
    """
    with tf.device("/CPU:0"):
        return make() if tf.executing_eagerly() else _in_turn(_last_gradient, make)


def _in_turn(chain: _Chain, make: Callable[[], Result]) -> Result:
    graph = tf.compat.v1.get_default_graph()
    previous = chain.get(graph)
    with tf.control_dependencies([previous] if previous is not None else []):
        made = make()
    chain[graph] = (made[0] if isinstance(made, list) else made).op
    return made

"""What `import ddl` does for Keras 2 in graphs of TensorFlow 1: its optimizers, IBM's callbacks.

Keras 2 is the package tf_keras, which `import keras` gives in TensorFlow 1 mode, and the older one
within TensorFlow, tensorflow.python.keras.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf  # noqa: TID253
from tensorflow.python.keras import backend as backend_in_tensorflow  # noqa: TID253
from tensorflow.python.keras.callbacks import Callback  # noqa: TID253

from ddl_ops import arrays, session_starts
from ddl_ops.collectives import bcast_variables
from ddl_ops.environment import PLACEMENT
from ddl_ops.gradients import grads_reduce, keeping_marks, reduce_gradients

v1 = tf.compat.v1
# Those that apply gradients, or compute them for fit(); others are below these.
_KINDS = (
    ("tensorflow.python.keras.optimizer_v1", "Optimizer"),
    ("tensorflow.python.keras.optimizer_v2.optimizer_v2", "OptimizerV2"),
    ("tensorflow.python.keras.mixed_precision.loss_scale_optimizer", "LossScaleOptimizer"),
    ("tf_keras.src.optimizers.optimizer_v1", "Optimizer"),
    ("tf_keras.src.optimizers.optimizer", "Optimizer"),
    ("tf_keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2"),
    ("tf_keras.src.mixed_precision.loss_scale_optimizer", "LossScaleOptimizer"),
    ("tf_keras.src.mixed_precision.loss_scale_optimizer", "LossScaleOptimizerV3"),
)
# Those that train in graphs of TensorFlow 1.
_MODELS = (
    ("tensorflow.python.keras.engine.training_v1", "Model"),
    ("tf_keras.src.engine.training_v1", "Model"),
)
_HOOKS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {}
# `within`: whether the thread is in an apply_gradients() whose gradients have been averaged.
_applying = threading.local()


def hook_optimizers() -> None:
    """From here on the optimizers of Keras 2 average gradients, where graphs are TensorFlow 1's.

    Those of tf.train, which Keras wraps, do so themselves, and those that Horovod's interface has
    distributed are left to it.
    """
    for module, name in _KINDS:
        kind = getattr(sys.modules.get(module), name, None)
        for method, hook in _HOOKS.items():
            if method in vars(kind or object):
                setattr(kind, method, hook(getattr(kind, method)))


def hook_fits(begin: Callable[[], None]) -> None:
    """From here on each fit() of Keras 2 in graphs of TensorFlow 1 calls `begin` first."""
    for module, name in _MODELS:
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None:
            kind.fit = _beginning(kind.fit, begin)


def _beginning(fit: Callable[..., Any], begin: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(fit)
    def fit_anew(*args: Any, **kwargs: Any) -> Any:
        begin()
        return fit(*args, **kwargs)

    return fit_anew


def _is_hook_of(method: str) -> Callable[[Any], Any]:
    def register(hook: Any) -> Any:
        _HOOKS[method] = hook
        return hook

    return register


def _averages_here(optimizer: Any) -> bool:
    if v1.executing_eagerly_outside_functions() or getattr(_applying, "within", False):
        return False
    distributed = sys.modules.get("ddl_ops.keras_optimizer")  # imports Keras
    return distributed is None or not distributed.is_distributed(optimizer)


@_is_hook_of("get_gradients")
def _for_fit(get_gradients: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_gradients)
    def get_reduced(self: Any, loss: Any, params: Any) -> Any:
        found = get_gradients(self, loss, params)
        if not _averages_here(self):
            return found
        reduced = reduce_gradients(found)
        session_starts.note_trained(zip(reduced, tf.nest.flatten(params), strict=True))
        return reduced

    return get_reduced


@_is_hook_of("apply_gradients")
def _for_loops(apply_gradients: Callable[..., Any]) -> Callable[..., Any]:
    # Loss scaling too: ranks must decide on the averages whether a step is skipped.
    @functools.wraps(apply_gradients)
    def apply_reduced(self: Any, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if not _averages_here(self):
            return apply_gradients(self, grads_and_vars, *args, **kwargs)
        pairs = grads_reduce(grads_and_vars)
        session_starts.note_trained(pairs)
        _applying.within = True
        try:
            return apply_gradients(self, pairs, *args, **kwargs)
        finally:
            _applying.within = False

    return apply_reduced


_is_hook_of("get_unscaled_gradients")(keeping_marks)


def _require_graph(what: str, instead: str) -> None:
    if v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            f"{what} is for Keras 2 in TensorFlow 1 mode (ddl-run --tf1). In Keras 3 use {instead}."
        )


class DDLCallback(Callback):
    """Averages the metrics of each epoch over the ranks; all ranks must have the same ones.

    Place it before callbacks that read metrics. Raises RuntimeError outside of TensorFlow 1 mode.
    """

    def __init__(self) -> None:
        _require_graph("ddl.DDLCallback", "ddl.keras.MetricAverageCallback")
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages in the place of this rank's."""
        if not logs or not PLACEMENT.launched:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        values = np.array([logs[name] for name in names], np.float64)
        # In no graph, which would grow with each epoch.
        arrays.add("the metrics of an epoch", values)
        logs.update(zip(names, (values / PLACEMENT.size).tolist(), strict=True))


class DDLGlobalVariablesCallback(Callback):
    """Begins fit() with rank 0's weights and optimizer state on every rank.

    What ranks initialise is alike without it; it is for what a script has loaded or set since.
    Raises RuntimeError outside of TensorFlow 1 mode.
    """

    model: Any

    def __init__(self) -> None:
        _require_graph("ddl.DDLGlobalVariablesCallback", "ddl.keras.BroadcastCallback")
        super().__init__()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Once for each fit(). Collective."""
        if not PLACEMENT.launched:
            return
        session = _session_of(self.model)
        with session.graph.as_default():
            variables = [*self.model.weights, *_variables_of(self.model.optimizer)]
            session.run(bcast_variables(variables, "ddl_global_variables"))


def _session_of(model: Any) -> Any:
    """That of the Keras which the model is of, with its variables initialised."""
    own = any(
        kind.__module__.startswith("tensorflow.python.keras.") for kind in type(model).__mro__
    )
    return (backend_in_tensorflow if own else v1.keras.backend).get_session()


def _variables_of(optimizer: Any) -> list[Any]:
    """Its slots and its step. Keras gives none for one of tf.train, which it wraps."""
    wrapped = getattr(optimizer, "optimizer", None)
    if isinstance(wrapped, v1.train.Optimizer):
        return [*wrapped.variables(), optimizer.iterations]
    return list(optimizer.weights)

"""State of TensorFlow and Keras that is committed, and gone on from after a restart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from horovod._keras.callbacks import variables_of
from horovod.common.basics import rank
from horovod.common.elastic import ObjectState
from horovod.tensorflow.functions import broadcast_object, broadcast_variables

v1 = tf.compat.v1

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class _WithVariables(ObjectState):
    """ObjectState with variables, of which it keeps NumPy arrays."""

    def __init__(self, session: Any, kwargs: dict[str, Any]) -> None:
        self._session = session
        super().__init__(
            functools.partial(broadcast_object, root_rank=0, session=session), rank, **kwargs
        )
        self._saved_values: list[np.ndarray[Any, Any]] = []
        self.save()

    def _variables(self) -> list[Any]:
        raise NotImplementedError

    def _run(self, fetches: Any) -> Any:
        return (self._session or v1.get_default_session()).run(fetches)

    def save(self) -> None:
        """Keeps copies of the attributes and of the variables' values."""
        super().save()
        variables = self._variables()
        if tf.executing_eagerly():
            self._saved_values = [np.array(one.numpy()) for one in variables]
        else:
            self._saved_values = self._run(variables)

    def restore(self) -> None:
        """Sets attributes and variables to what was kept; new variables stay as they are."""
        super().restore()
        session = None if tf.executing_eagerly() else self._session or v1.get_default_session()
        for variable, value in zip(self._variables(), self._saved_values, strict=False):
            if session is None:
                variable.assign(value)
            else:
                variable.load(value, session)

    def sync(self) -> None:
        """Gives all ranks rank 0's attributes and variables, and saves them. Collective."""
        done = broadcast_variables(self._variables(), root_rank=0)
        if not tf.executing_eagerly():
            self._run(done)
        super().sync()
        self.save()


class TensorFlowState(_WithVariables):
    """State of a list of variables.

    Args:
        variables: by default, in TensorFlow 1 graphs, all global ones.
        session: in TensorFlow 1 graphs; by default the one around the call.
        kwargs: attributes, with their first values.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        self.variables = list(v1.global_variables() if variables is None else variables)
        super().__init__(session, kwargs)

    def _variables(self) -> list[Any]:
        return self.variables


class TensorFlowKerasState(_WithVariables):
    """State of a model of Keras, built or not, and its optimizer.

    Args:
        model: whose weights.
        optimizer: by default the one that it is compiled with, if it is.
        backend: has no effect.
        kwargs: attributes, with their first values.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        super().__init__(None, kwargs)

    def _variables(self) -> list[Any]:
        weights = list(self.model.weights) if self.model.built else []
        return [*weights, *(variables_of(self.optimizer) if self.optimizer is not None else [])]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the function that trains: its first argument, a state, is the same on all ranks."""

    @functools.wraps(func)
    def wrapped(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.sync()
        return func(state, *args, **kwargs)

    return wrapped

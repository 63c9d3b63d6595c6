"""State of TensorFlow and Keras that is committed, and gone on from after a restart."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf
from ddl_ops.arrays import say

from horovod._keras.callbacks import variables_of
from horovod._keras.optimizer import keras_session, make_variables, trained_by
from horovod.common.basics import rank
from horovod.common.commits import Commit
from horovod.common.elastic import ObjectState, run_fn
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
        # Not by save(), which a subclass may extend, and which is not made yet.
        self._saved_values = self._values()

    def _variables(self) -> list[Any]:
        raise NotImplementedError

    def _run(self, fetches: Any) -> Any:
        return (self._session or v1.get_default_session()).run(fetches)

    def save(self) -> None:
        """Keeps copies of the attributes and of the variables' values."""
        super().save()
        self._saved_values = self._values()

    def _values(self) -> list[np.ndarray[Any, Any]]:
        variables = self._variables()
        if tf.executing_eagerly():
            return [np.array(one.numpy()) for one in variables]
        return [np.asarray(one) for one in self._run(variables)]

    def restore(self) -> None:
        """Sets attributes and variables to what was kept; new variables stay as they are."""
        super().restore()
        session = None if tf.executing_eagerly() else self._session or v1.get_default_session()
        for variable, value in zip(self._variables(), self._saved_values, strict=False):
            if session is None:
                variable.assign(value)
            else:
                variable.load(value, session)

    def _kept(self, checks: int) -> Commit:
        return Commit(checks, self._saved_state, self._saved_values)

    def _take(self, commit: Commit) -> None:
        super()._take(commit)
        self._saved_values = _that_fit(commit.arrays, self._values())

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
    """State of a model of Keras, which is built, and its optimizer. Else ValueError.

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
        if not getattr(model, "built", True):
            raise ValueError(
                "The model of a state must be built, so that its weights are there to be kept. "
                "Call model.build(input_shape), or the model on a batch."
            )
        self.model = model
        self.optimizer = optimizer or getattr(model, "optimizer", None)
        self._told = False
        self._made: bool | None = None  # by the script, before the state is gone on with
        # Keras makes none a default session.
        super().__init__(None if tf.executing_eagerly() else keras_session(), kwargs)

    def _variables(self) -> list[Any]:
        of_optimizer = [] if self.optimizer is None else variables_of(self.optimizer)
        return [*self.model.weights, *of_optimizer]

    def go_on(self, func: Callable[..., Any], caller: FrameType) -> None:
        """As that of State."""
        if self._made is None:
            self._made = bool(trained_by(self.optimizer, self.model.weights))
        super().go_on(func, caller)

    def _kept(self, checks: int) -> Commit:
        trained = trained_by(self.optimizer, self.model.weights)
        if None in trained and not self._told:
            self._told = True
            # Variables of the optimizer that _prepare is to make it cannot make beside the model.
            then = (
                "The next start goes on without the values of those variables."
                if self._made
                else "No later start will go on from what is committed."
            )
            say(f"{_BESIDE} {then} {_CURE}")
        return dataclasses.replace(super()._kept(checks), trained=trained)

    def _prepare(self, variables: int, commit: Commit | None) -> None:
        # By all ranks: one alone may have an optimizer with variables, which it has loaded.
        trained = self._bcast_object(None if commit is None else commit.trained)
        # An optimizer has its variables from its first step on, and a state may be made before.
        if self.optimizer is None or len(self._variables()) >= variables:
            return
        if not trained:  # not known
            chosen = self.model.trainable_variables
        elif None in trained:
            raise ValueError(f"{_BESIDE} {_CURE}")
        else:  # those of another model are found not to fit, where they are taken
            chosen = [self.model.weights[n] for n in trained if n < len(self.model.weights)]
        make_variables(self.optimizer, chosen)
        if not tf.executing_eagerly():
            keras_session()  # initialises them


_BESIDE = "hvd.elastic: the optimizer trains variables that are no weights of the state's model."
_CURE = (
    "Call optimizer.build(variables) at first, and commit all: "
    "hvd.elastic.TensorFlowState([*model.weights, *others, *optimizer.variables], ...)."
)


def _that_fit(
    committed: Sequence[np.ndarray[Any, Any]], now: Sequence[np.ndarray[Any, Any]]
) -> list[np.ndarray[Any, Any]]:
    """Those committed; ValueError unless they are of the variables there are now, or the first."""
    cure = "Remove horovod-*.commit in CHECKPOINT_DIR to begin from the start."
    if len(committed) > len(now):
        raise ValueError(
            f"hvd.elastic: what was committed has {len(committed)} variables, and the state has "
            f"{len(now)}: it is of another model or optimizer. {cure}"
        )
    for number, (one, other) in enumerate(zip(committed, now, strict=False)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            raise ValueError(
                f"hvd.elastic: variable {number} is {one.dtype.name}{list(one.shape)} in what was "
                f"committed, and {other.dtype.name}{list(other.shape)} in the state: it is of "
                f"another model. {cure}"
            )
    return list(committed)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the function that trains: its first argument, a state, is the same on all ranks.

    It is that of the last commit, where the job was started again: see docs/coming-from-horovod.md.
    """
    return run_fn(func)

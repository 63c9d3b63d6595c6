"""Has each fit() of a Keras model note digests of its weights (``ddl_ops.weight_notes``)."""

from __future__ import annotations

import atexit
import functools
import inspect
from typing import Any

import keras  # noqa: TID253

from ddl_ops.weight_notes import WeightNotes, is_due, place


@functools.cache
def hook_fit() -> None:
    """From here on, where this process leaves notes. The callbacks of a script come first."""
    path = place()
    if path is None:
        return
    notes = WeightNotes(path)
    owner: Any = next(base for base in keras.Model.__mro__ if "fit" in vars(base))
    fit = owner.fit
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fit_noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        own = _NoteWeights(notes)
        callbacks = given.arguments.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            own.set_model(self)
            callbacks.append(own)
        else:
            before = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
            given.arguments["callbacks"] = [*(one for one in before if one is not None), own]
        return fit(*given.args, **given.kwargs)

    owner.fit = fit_noted


_last: list[_NoteWeights] = []


@atexit.register
def _note_the_end() -> None:
    """Of the last fit(): one of many is no end."""
    for one in _last:
        one.note_now()


class _NoteWeights(keras.callbacks.Callback):
    def __init__(self, notes: WeightNotes) -> None:
        super().__init__()
        self._notes = notes
        self._seen = 0
        self._begun = False

    def _step(self, counted: int) -> int:
        # As it is saved with the model: a training that goes on counts on.
        done = getattr(self.model.optimizer, "iterations", None)
        return counted if done is None else int(done.numpy())

    def _note(self, step: int) -> None:
        self._seen = step
        weights = self.model.weights
        if weights:
            names = [one.path for one in weights]
            self._notes.note(step, names, (one.numpy() for one in weights))

    def note_now(self) -> None:
        """What the weights are."""
        self._note(self._step(self._seen))

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._begun:
            return
        # Not when fit() begins: a callback may restore what an earlier process saved, after that.
        self._begun = True
        step = self._seen = self._step(0)
        if not self._notes.begun or is_due(step, step - 1):
            self._note(step)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        step = self._step(self._seen + 1)
        if is_due(step, self._seen):
            self._note(step)
        self._seen = step

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        _last[:] = [self]

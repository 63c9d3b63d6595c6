"""Before the first step of a TensorFlow 1 session the ranks compare their weights.

Its initialisers have made them equal. Since then a rank may have restored a checkpoint, alone.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf  # noqa: TID253
from tensorflow.python.client import session as session_module  # noqa: TID253

from ddl_ops.equal_weights import start_equal_in_session
from ddl_ops.session_runs import Steps

# Of each graph, the names of ops that give averaged gradients, and of the variables that these are
# of: one op may give those of many.
_trained: weakref.WeakKeyDictionary[Any, dict[str, set[str]]] = weakref.WeakKeyDictionary()
# Of each session, the variables that have been compared.
_compared: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
# Variables are read in parts of at most this, unless one alone is larger.
_PART_BYTES = 64 * 2**20


class _TrainingSteps(Steps):
    """Runs that apply what an optimizer has averaged. Others may be those of some ranks alone."""

    def counts(self, op: Any) -> bool:
        return op.name in _trained.get(op.graph, ())


def note_trained(pairs: Iterable[tuple[Any, Any]]) -> None:
    """An optimizer has averaged these gradients over all ranks, to apply them to the variables."""
    for gradient, variable in pairs:
        gradient = getattr(gradient, "values", gradient)
        if not isinstance(gradient, tf.Tensor) or tf.executing_eagerly():
            continue
        if not gradient.graph.building_function:  # which no session runs
            of_graph = _trained.setdefault(gradient.graph, {})
            of_graph.setdefault(gradient.op.name, set()).add(variable.op.name)


def begin_anew() -> None:
    """The weights are compared again before the next step, as a fit() begins on all ranks."""
    if _in_order():
        _compared.clear()


def _in_order() -> bool:
    # Other threads need not be in the same order on all ranks, nor have names.
    return threading.current_thread() is threading.main_thread()


@functools.cache
def hook_runs() -> None:
    """Has sessions compare, however a step is run."""
    base = session_module.BaseSession
    run, make, make_for_keras = base.run, base.make_callable, base._make_callable_from_options
    steps = _TrainingSteps()

    def start(session: Any, fetches: Any) -> None:
        of_graph = _trained.get(session.graph)
        compared = _compared.get(session, set())
        if not of_graph or not _in_order():
            return
        if all(map(compared.issuperset, of_graph.values())):
            return
        try:
            held = steps.held(session.graph, fetches)
        except (KeyError, TypeError, ValueError):  # no fetches, of which the run itself says so
            return
        trained = set().union(*map(of_graph.__getitem__, held))
        if trained <= compared:
            return
        _compared[session] = compared | trained
        _start(functools.partial(run, session), session.graph, trained)

    @functools.wraps(run)
    def run_equal(self: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        start(self, fetches)
        return run(self, fetches, *args, **kwargs)

    def starting(session: Any, fetches: Any, made: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            start(session, fetches)
            return made(*args, **kwargs)

        return called

    @functools.wraps(make)
    def make_equal(self: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        return starting(self, fetches, make(self, fetches, *args, **kwargs))

    @functools.wraps(make_for_keras)
    def make_equal_for_keras(self: Any, callable_options: Any) -> Any:
        fetches = [*callable_options.fetch, *callable_options.target]
        return starting(self, fetches, make_for_keras(self, callable_options))

    base.run, base.make_callable = run_equal, make_equal
    base._make_callable_from_options = make_equal_for_keras


def _start(run: Callable[..., Any], graph: Any, trained: set[str]) -> None:
    def read(variables: Sequence[Any]) -> Iterator[np.ndarray[Any, Any] | None]:
        for part in _in_parts(variables):
            yield from _values(run, part)

    def assign(variable: Any, value: np.ndarray[Any, Any]) -> None:
        initializer = variable.initializer
        operation = getattr(initializer, "op", initializer)
        run(operation, {operation.inputs[1]: value})  # as Variable.load()

    keys = tf.compat.v1.GraphKeys
    variables: dict[str, Any] = {}
    for key in (keys.GLOBAL_VARIABLES, keys.MODEL_VARIABLES, keys.MOVING_AVERAGE_VARIABLES):
        variables |= {one.op.name: one for one in graph.get_collection(key)}
    of_model = [
        one
        for _, one in sorted(variables.items())
        if one.dtype.base_dtype != tf.string and is_of_model(one, graph)
    ]
    start_equal_in_session(
        [one for one in of_model if one.op.name in trained],
        [one for one in of_model if one.op.name not in trained],
        read,
        assign,
    )


def _values(run: Callable[..., Any], variables: Sequence[Any]) -> list[Any]:
    """Their values; None of those that have none yet."""
    try:
        return list(run(variables))
    except tf.errors.FailedPreconditionError:
        if len(variables) == 1:
            return [None]
        half = len(variables) // 2
        return [*_values(run, variables[:half]), *_values(run, variables[half:])]


def _in_parts(variables: Sequence[Any]) -> Iterator[list[Any]]:
    part: list[Any] = []
    room = _PART_BYTES
    for variable in variables:
        dims = tf.TensorShape(variable.shape)
        known = dims.is_fully_defined()
        size = math.prod(dims.as_list()) * variable.dtype.base_dtype.size if known else _PART_BYTES
        if part and size > room:
            yield part
            part, room = [], _PART_BYTES
        part.append(variable)
        room -= size
    if part:
        yield part


def is_of_model(variable: Any, graph: Any) -> bool:
    """Whether a variable is the model's, and not a rank's own.

    Local variables are the rank's, and those that are neither trained nor in a collection of the
    model's, which may hold its data.
    """

    def is_in(collection: str) -> bool:
        others = graph.get_collection(collection)
        return any(getattr(other, "op", None) is variable.op for other in others)

    keys = tf.compat.v1.GraphKeys
    if is_in(keys.LOCAL_VARIABLES):
        return False
    of_model = (keys.GLOBAL_VARIABLES, keys.MODEL_VARIABLES, keys.MOVING_AVERAGE_VARIABLES)
    return variable.trainable or any(map(is_in, of_model))

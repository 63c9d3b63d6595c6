"""Which runs of TensorFlow 1 sessions hold collectives; two at once are refused."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf  # noqa: TID253
from tensorflow.python.client import session as session_module  # noqa: TID253
from tensorflow.python.ops import op_selector  # noqa: TID253

from ddl_ops.environment import PLACEMENT


@functools.cache
def refuse_runs_beside_each_other(collectives: Collection[str]) -> None:
    """Where two threads of a session run one collective at once, ranks may pair different runs.

    So the summaries of tf.train.Supervisor, which have a thread of their own, would take the place
    of a training step on one rank, and of another step on the next.

    Args:
        collectives: types of ops. Once for a process.
    """
    if PLACEMENT.size == 1:
        return  # nothing is paired
    base = session_module.BaseSession
    run = base.run
    known = Steps(collectives)
    under_way: list[tuple[Any, Any]] = []  # sessions and what they fetch
    lock = threading.Lock()

    @functools.wraps(run)
    def run_alone(self: Any, fetches: Any, *args: Any, **kwargs: Any) -> Any:
        mine = (self, fetches)
        with lock:
            beside = [theirs for session, theirs in under_way if session is self]
            if shared := beside and known.shared(self.graph, fetches, beside):
                # A cause, which FailedPreconditionError would not be taken for.
                raise tf.errors.InvalidArgumentError(
                    None,
                    None,
                    f"Two threads of rank {PLACEMENT.rank} run {shared} at once in one session: "
                    "ranks cannot tell which run belongs to which of theirs. tf.train.Supervisor "
                    "writes summaries in a thread: give it summary_op=None, and run them with the "
                    "training step. Else let one thread run what needs other ranks.",
                )
            under_way.append(mine)
        try:
            return run(self, fetches, *args, **kwargs)
        finally:
            with lock:
                del under_way[next(i for i, one in enumerate(under_way) if one is mine)]

    base.run = run_alone


class Steps:
    """Which runs of a session are steps: those that hold ops of these types."""

    def __init__(self, types: Collection[str] = ()) -> None:
        self._types = types
        self._known: weakref.WeakKeyDictionary[Any, dict[tuple[str, ...], frozenset[str]]] = (
            weakref.WeakKeyDictionary()
        )

    def is_one(self, run_context: Any) -> bool:
        return self.is_step(run_context.session.graph, run_context.original_args.fetches)

    def is_step(self, graph: Any, fetches: Any) -> bool:
        return bool(self.held(graph, fetches))

    def counts(self, op: Any) -> bool:
        """Whether what holds this op is a step."""
        return op.type in self._types

    def shared(self, graph: Any, fetches: Any, others: Iterable[Any]) -> str:
        """The name of an op that both these fetches and others need; empty if there is none."""
        try:
            mine = self.held(graph, fetches)
            theirs = [self.held(graph, one) for one in others] if mine else []
        except (KeyError, TypeError, ValueError):  # no fetches, of which the run itself says so
            return ""
        return min(mine & frozenset().union(*theirs), default="")

    def held(self, graph: Any, fetches: Any) -> frozenset[str]:
        """The names of the ops that count and that these fetches need.

        Raises KeyError, TypeError or ValueError if these are none of the graph's.
        """
        names = tuple(graph.as_graph_element(fetch).name for fetch in _flat(fetches))
        known = self._known.setdefault(graph, {})
        if names not in known:
            known[names] = frozenset(op.name for op in _needed(graph, names) if self.counts(op))
        return known[names]


def _flat(fetches: Any) -> Iterator[Any]:
    # tf.nest sorts keys, and a MonitoredSession fetches for hooks, by themselves.
    if isinstance(fetches, Mapping):
        fetches = list(fetches.values())
    if isinstance(fetches, (list, tuple)):
        for one in fetches:
            yield from _flat(one)
    elif fetches is not None:
        yield from tf.nest.flatten(fetches, expand_composites=True)


def _needed(graph: Any, names: Iterable[str]) -> Iterable[Any]:
    """The ops that tensors and ops of these names need to run."""
    elements = [graph.as_graph_element(name) for name in names]
    operations = [getattr(element, "op", element) for element in elements]
    found: Iterable[Any] = op_selector.get_backward_walk_ops(operations, control_inputs=True)
    return found

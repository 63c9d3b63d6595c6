"""Gradients added up over several backward passes, and combined over the ranks once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from ddl_ops.gradients import mark_reduced

from horovod.tensorflow.gradient_reduction import DistributedGradients
from horovod.tensorflow.util import key_of

v1 = tf.compat.v1


class LocalGradientAggregation:
    """Sums gradients of `passes` calls; of each last one, the ranks combine the sums.

    In TensorFlow 1 graphs its variables are local ones: neither saved nor broadcast.

    Args:
        passes: backward_passes_per_step.
        reduce: combines the sums over the ranks.
        average: whether the sums are divided by `passes`.
        session: gives that of TensorFlow 1 in which the variables begin, as Keras knows nothing of
            them; else the script initialises local variables.

    Attributes:
        counter: passes since the last update, an int32 variable; None before the first.
    """

    def __init__(
        self,
        passes: int,
        reduce: DistributedGradients,
        average: bool,
        session: Callable[[], Any] | None = None,
    ) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}. Pass 1 or more.")
        self._passes = passes
        self._reduce = reduce
        self._average = average
        self._session = session
        self._sums: dict[Any, Any] = {}  # by the variable that they are of
        self.counter: Any = None

    def compute(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """What is to be applied, or the sums so far.

        Sums of variables that are not among these are dropped with the last pass.

        Raises ValueError for IndexedSlices, unless sparse_as_dense is set, and for a variable that
        had a gradient and has none now.
        """
        if not self._reduce.reduction.sparse_as_dense and any(
            isinstance(gradient, tf.IndexedSlices) for gradient in gradients
        ):
            raise ValueError(
                "Sparse gradients cannot be added up over several passes as they are. Pass "
                "sparse_as_dense=True with backward_passes_per_step > 1."
            )
        dense = [None if one is None else tf.convert_to_tensor(one) for one in gradients]
        present = [i for i, one in enumerate(dense) if one is not None]
        for variable, gradient in zip(variables, dense, strict=True):
            if gradient is None and key_of(variable) in self._sums:
                raise ValueError(
                    f"{variable.name} has no gradient, and had one in an earlier pass. With "
                    "backward_passes_per_step > 1 a variable must have one in all passes or none."
                )
        pairs = {key_of(variables[i]): (dense[i], variables[i]) for i in present}
        self._build({key: pair for key, pair in pairs.items() if key not in self._sums})
        sums = [self._sums[key_of(variables[i])] for i in present]
        added = [
            total.assign_add(dense[i], read_value=False)
            for total, i in zip(sums, present, strict=True)
        ]
        with tf.control_dependencies(_ops(added)):
            counted = self.counter.assign_add(1, read_value=False)
        with tf.control_dependencies(_ops([counted])):
            results = _either(
                tf.equal(self.counter.read_value(), self._passes),
                lambda: self._reduced(variables, present),
                lambda: [total.read_value() for total in sums],
            )
        for i, one in zip(present, results, strict=True):
            dense[i] = tf.identity(one)
            mark_reduced(dense[i], self._reduce.reduction.ranks)
        return dense

    def _build(self, missing: Mapping[Any, tuple[Any, Any]]) -> None:
        """Makes the sums of these gradients and their variables, and the counter at first."""
        with tf.init_scope():
            options: dict[str, Any] = {"trainable": False, "use_resource": True}
            if not tf.executing_eagerly():
                options["collections"] = [v1.GraphKeys.LOCAL_VARIABLES]
            with tf.name_scope("horovod_aggregation"):
                made = {
                    key: v1.Variable(tf.zeros(variable.shape, gradient.dtype), **options)
                    for key, (gradient, variable) in missing.items()
                }
                self._sums |= made
                begun = list(made.values())
                if self.counter is None:
                    self.counter = v1.Variable(0, dtype=tf.int32, **options)
                    begun.append(self.counter)
            if begun and self._session is not None and not tf.executing_eagerly():
                self._session().run(v1.variables_initializer(begun))

    def _reduced(self, variables: Sequence[Any], present: Sequence[int]) -> list[Any]:
        sums: list[Any] = [None] * len(variables)  # where there is none, ranks must agree on that
        for i in present:
            sums[i] = self._sums[key_of(variables[i])].read_value()
        combined = self._reduce(sums, variables)
        reduced = [combined[i] for i in present]
        with tf.control_dependencies(reduced if not tf.executing_eagerly() else []):
            cleared = [total.assign(tf.zeros_like(total)) for total in self._sums.values()]
            cleared.append(self.counter.assign(0))
        with tf.control_dependencies(cleared if not tf.executing_eagerly() else []):
            passes = self._passes if self._average else 1
            return [tf.identity(one) / tf.cast(passes, one.dtype) for one in reduced]

    def apply(
        self, gradients: Sequence[Any], update: Callable[[], Any], skip: Callable[[], Any]
    ) -> Any:
        """Runs `update` after the last of the passes, `skip` after the others."""
        given = [one for one in gradients if one is not None]
        with tf.control_dependencies(given if not tf.executing_eagerly() else []):
            return _either(
                tf.equal(self.counter.read_value(), 0),
                _without_result(update),
                _without_result(skip),
            )


def _ops(assigned: Sequence[Any]) -> list[Any]:
    """In a graph an assignment is an op to wait for; eagerly it has happened."""
    return [] if tf.executing_eagerly() else [one for one in assigned if one is not None]


def _either(condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    if tf.executing_eagerly():
        return yes() if bool(condition) else no()
    # That of TensorFlow 1 gives the only one of a list by itself.
    return tf.compat.v2.cond(condition, yes, no)


def _without_result(run: Callable[[], Any]) -> Callable[[], Any]:
    """For a branch of tf.cond: its ops run, and both branches give the same."""

    def branch() -> Any:
        done = run()
        if tf.executing_eagerly():
            return done
        done = getattr(done, "op", done)  # of an assignment, too
        waits = [done] if isinstance(done, tf.Operation) else []
        with tf.control_dependencies(waits):
            return tf.constant(True)

    return branch

"""Gradients added up over several backward passes, and combined over the ranks once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from ddl_ops.gradients import mark_reduced, was_reduced

from horovod.tensorflow.gradient_reduction import DistributedGradients
from horovod.tensorflow.util import key_of

v1 = tf.compat.v1
HELPER_IS_NOT_HERE = (
    "{name} is an internal part of Horovod, and not of ddl, which stands in for it. Pass "
    "backward_passes_per_step to hvd.DistributedOptimizer, which adds gradients up."
)
# The attribute of a gradient that is a sum over passes.
_SUMMED = "_hvd_summed"


def mark_summed(gradient: Any) -> None:
    """Marks a gradient as made of what LocalGradientAggregation.compute has returned."""
    setattr(gradient, _SUMMED, True)


class _Sums(NamedTuple):
    """Of a set of variables.

    Attributes:
        present: the places of those that have a gradient.
        totals: of these.
        counter: passes since the last update.
    """

    present: list[int]
    totals: list[Any]
    counter: Any


class LocalGradientAggregation:
    """Sums gradients of `passes` calls; of each last one, the ranks combine the sums.

    Each set of variables has sums and passes of its own: as of a generator and a critic, or before
    and after layers were frozen. In TensorFlow 1 graphs these are local variables: neither saved
    nor broadcast.

    Args:
        passes: backward_passes_per_step.
        reduce: combines the sums over the ranks.
        average: whether the sums are divided by `passes`.
        session: gives that of TensorFlow 1 in which the variables begin, as Keras knows nothing of
            them; else the script initialises local variables.
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
        # By the variables (key_of), the last one that was computed at the end.
        self._of: dict[tuple[Any, ...], _Sums] = {}

    @property
    def adds_up(self) -> bool:
        """Whether it has added up gradients of any variables."""
        return bool(self._of)

    @property
    def counter(self) -> Any:
        """The passes since the last update, of the variables that were computed last.

        Raises AttributeError before any were.
        """
        if not self._of:
            raise AttributeError("counter: no gradients have been added up")
        return next(reversed(self._of.values())).counter

    def compute(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """What is to be applied, or the sums so far.

        Raises ValueError for IndexedSlices, unless sparse_as_dense is set, and for a variable that
        has a gradient in some passes and none in others.
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
        key = tuple(key_of(variable) for variable in variables)
        sums = self._of.pop(key, None)
        if sums is None:
            sums = self._build(present, [(dense[i], variables[i]) for i in present])
        self._of[key] = sums
        if other := {*present} ^ {*sums.present}:
            raise ValueError(
                f"{variables[min(other)].name} has a gradient in some passes and none in others. "
                "With backward_passes_per_step > 1 it must have one in all, or in none."
            )
        added = [
            total.assign_add(dense[i], read_value=False)
            for total, i in zip(sums.totals, present, strict=True)
        ]
        with tf.control_dependencies(_ops(added)):
            counted = sums.counter.assign_add(1, read_value=False)
        with tf.control_dependencies(_ops([counted])):
            results = _either(
                tf.equal(sums.counter.read_value(), self._passes),
                lambda: self._reduced(variables, sums),
                lambda: [total.read_value() for total in sums.totals],
            )
        for i, one in zip(present, results, strict=True):
            dense[i] = tf.identity(one)
            mark_reduced(dense[i], self._reduce.reduction.ranks)
            mark_summed(dense[i])
        return dense

    def _build(self, present: list[int], pairs: Sequence[tuple[Any, Any]]) -> _Sums:
        with tf.init_scope():
            options: dict[str, Any] = {"trainable": False, "use_resource": True}
            if not tf.executing_eagerly():
                options["collections"] = [v1.GraphKeys.LOCAL_VARIABLES]
            with tf.name_scope("horovod_aggregation"):
                totals = [
                    v1.Variable(tf.zeros(variable.shape, gradient.dtype), **options)
                    for gradient, variable in pairs
                ]
                counter = v1.Variable(0, dtype=tf.int32, **options)
            if self._session is not None and not tf.executing_eagerly():
                self._session().run(v1.variables_initializer([*totals, counter]))
        return _Sums(present, totals, counter)

    def _reduced(self, variables: Sequence[Any], sums: _Sums) -> list[Any]:
        given: list[Any] = [None] * len(variables)  # where there is none, ranks must agree on that
        for total, i in zip(sums.totals, sums.present, strict=True):
            given[i] = total.read_value()
        combined = self._reduce(given, variables)
        reduced = [combined[i] for i in sums.present]
        with tf.control_dependencies(reduced if not tf.executing_eagerly() else []):
            cleared = [total.assign(tf.zeros_like(total)) for total in sums.totals]
            cleared.append(sums.counter.assign(0))
        with tf.control_dependencies(cleared if not tf.executing_eagerly() else []):
            passes = self._passes if self._average else 1
            return [tf.identity(one) / tf.cast(passes, one.dtype) for one in reduced]

    def are_sums(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Whether these are sums of several passes, of which not each is followed by an update.

        Not what the script has combined by itself, which bears the mark of that alone.
        """
        return bool(self._counters(variables)) and any(
            hasattr(gradient, _SUMMED) or not was_reduced(gradient)
            for gradient in gradients
            if gradient is not None
        )

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Runs `update` after the last of the passes of these variables, `skip` after the others.

        Of gradients that are sums: see are_sums. InvalidArgumentError where they are of several
        sets, of which some have more passes to come than others.
        """
        given = [one for one in gradients if one is not None]
        with tf.control_dependencies(given if not tf.executing_eagerly() else []):
            first, *others = [counter.read_value() for counter in self._counters(variables)]
            alike = [
                v1.debugging.assert_equal(
                    first,
                    other,
                    # Else those that are due would be lost, for others that are not.
                    message="Gradients of several sets of variables are applied at once, and have "
                    "been added up over different numbers of passes. Apply each set by itself.",
                )
                for other in others
            ]
            with tf.control_dependencies(_ops(alike)):
                return _either(tf.equal(first, 0), _without_result(update), _without_result(skip))

    def _counters(self, variables: Sequence[Any]) -> list[Any]:
        """Of the sums that these variables have; they may be some of a set, or of several sets."""
        keys = [key_of(variable) for variable in variables]
        if (of_these := self._of.get(tuple(keys))) is not None:
            return [of_these.counter]
        # A script may leave out variables without a gradient, or apply several sets at once.
        latest = list(reversed(self._of.items()))
        for of_set, sums in latest:
            if {*keys} <= {*of_set}:
                return [sums.counter]
        counters, others = [], {*keys}
        for of_set, sums in latest:
            if not others.isdisjoint(of_set):
                counters.append(sums.counter)
                others -= {*of_set}
        return counters


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


def __getattr__(name: str) -> Any:
    if name != "LocalGradientAggregationHelper":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    raise ImportError(HELPER_IS_NOT_HERE.format(name=name))

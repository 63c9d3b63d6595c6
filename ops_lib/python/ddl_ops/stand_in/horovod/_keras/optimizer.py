"""Keras optimizers that combine gradients over the ranks."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import keras
import tensorflow as tf
from ddl_ops import keras_optimizer
from ddl_ops.gradients import (
    is_reduced,
    keeping_marks,
    mark_reduced,
    was_combined,
    was_left_local,
    was_reduced,
)

from horovod.common.basics import Average, rank, require_initialized
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregation, mark_summed
from horovod.tensorflow.gradient_reduction import DistributedGradients, Reduction
from horovod.tensorflow.tape import weights_of
from horovod.tensorflow.util import key_of, tensorflow_variable

v1 = tf.compat.v1


def is_keras_optimizer(optimizer: Any) -> bool:
    """Whether it is of Keras 3, or of Keras 2."""
    return isinstance(optimizer, keras.optimizers.Optimizer) or _is_keras_2(optimizer)


def _is_keras_2(optimizer: Any) -> bool:
    if (tf_keras := sys.modules.get("tf_keras")) is None:
        return False
    kinds = (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer)
    return isinstance(optimizer, kinds)


def of_tf_train(optimizer: Any) -> Any:
    """The optimizer of tf.train that it is, or has within it; None if that is another."""
    if not isinstance(optimizer, v1.train.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)  # that Keras 2 has wrapped
    while isinstance(getattr(optimizer, "_optimizer", None), v1.train.Optimizer):
        optimizer = optimizer._optimizer  # that a DistributedOptimizer has
    return optimizer if isinstance(optimizer, v1.train.Optimizer) else None


def make_variables(optimizer: Any, variables: Sequence[Any]) -> None:
    """Gives an optimizer its own variables before its first step, if it can have them."""
    if getattr(optimizer, "built", False) is True:  # Keras 3: build() need not ask
        return
    if (of_train := of_tf_train(optimizer)) is not None:
        of_train._create_slots([tensorflow_variable(one) for one in variables])
        return
    names = ("build", "_create_all_weights")  # of Keras 2's older optimizers
    of_optimizer = (getattr(optimizer, name, None) for name in names)
    if (build := next(filter(None, of_optimizer), None)) is not None:
        build(variables)


def trained_by(optimizer: Any, weights: Sequence[Any]) -> list[int | None]:
    """The numbers of the weights for which an optimizer has variables of its own, in its order.

    None for a variable that is no such weight. Empty before it has any, or where it is not known.
    """
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of loss scaling
    known: Iterable[Any]
    key: Callable[[Any], Any]
    if (of_train := of_tf_train(optimizer)) is not None:
        known = next(iter(of_train._slots.values()), {})
        key = _key_of_tf_train
    elif _is_keras_2(optimizer):  # its older optimizers have slots alone
        known = getattr(optimizer, "_index_dict", None) or getattr(optimizer, "_slots", None) or {}
        key = _key_of_keras_2
    else:
        known = map(key_of, getattr(optimizer, "_trainable_variables", None) or [])
        key = key_of
    numbers = {key(weight): number for number, weight in enumerate(weights)}
    return [numbers.get(one) for one in known]


def _key_of_tf_train(variable: Any) -> Any:
    inner = tensorflow_variable(variable)
    return (inner.op.graph, inner.op.name) if hasattr(inner, "op") else inner._unique_id


def _key_of_keras_2(variable: Any) -> Any:
    in_graph = getattr(variable, "_in_graph_mode", False)
    return variable._shared_name if in_graph else variable._unique_id


def keras_session() -> Any:
    """In TensorFlow 1 graphs the session in which Keras runs, with its variables initialised.

    In those of a Keras that has none, the one around the call.
    """
    return getattr(v1.keras.backend, "get_session", v1.get_default_session)()


def distribute(
    optimizer: Any, reduction: Reduction, passes: int = 1, average_passes: bool = False
) -> Any:
    """Makes `optimizer` combine gradients over the ranks before each update, and returns it.

    Its class becomes one below its own, of the same name, which saved models name as its own. One
    that was given before, as for the next fold, stays as it is: another is made as that one was.

    Args:
        optimizer: of Keras 3 or 2.
        reduction: how.
        passes: backward_passes_per_step.
        average_passes: average_aggregated_gradients.

    Raises ValueError if it was distributed otherwise, or before hvd.init().
    """
    require_initialized()
    if (another := getattr(optimizer, "_hvd_another", None)) is not None:
        made = _distributed(another(), reduction, passes, average_passes)
        if rank() == 0 and (rates := _rates(made, optimizer)):
            _warn(
                f"this {type(optimizer).__name__} was wrapped before, and a new one is made as it "
                f"was at first, with a learning rate of {rates[0]:g}; by now it has {rates[1]:g}. "
                "If you have set that, set it on what DistributedOptimizer returns."
            )
        return made
    another = _maker_of(optimizer)
    optimizer = _distributed(optimizer, reduction, passes, average_passes)
    optimizer._hvd_another = another
    return optimizer


def _warn(of: str) -> None:
    print(f"ddl: rank 0: WARNING: {of}", file=sys.stderr, flush=True)


def _rates(*optimizers: Any) -> list[float]:
    """Their learning rates, if these are numbers, and differ."""
    try:
        rates = [float(optimizer.learning_rate) for optimizer in optimizers]
    except (AttributeError, TypeError, ValueError):  # schedules, or tensors of a graph
        return []
    return rates if len(set(rates)) > 1 else []


def _maker_of(optimizer: Any) -> Callable[[], Any] | None:
    """Makes another as an optimizer is now; None if its class cannot."""
    try:
        kind, config = type(optimizer), optimizer.get_config()
    except Exception:  # whatever a script's own class raises: it trains once
        return None
    # A copy: Keras puts objects into it.
    return lambda: kind.from_config(copy.deepcopy(config))


def _distributed(optimizer: Any, reduction: Reduction, passes: int, average_passes: bool) -> Any:
    if keras_optimizer.is_distributed(optimizer):
        raise ValueError(
            f"The optimizer {optimizer.name!r} is distributed already: wrap it once, or gradients "
            "would be averaged twice."
        )
    if hasattr(optimizer, "inner_optimizer"):
        inner = _distributed(optimizer.inner_optimizer, reduction, passes, average_passes)
        optimizer.register_local_var = inner.register_local_var
        return optimizer
    mixin: type = _Keras3
    if _is_keras_2(optimizer):
        mixin = _Keras2
        _hook_loss_scaling_of_keras_2()
    optimizer.__class__ = _class_below(type(optimizer), mixin, (reduction, passes, average_passes))
    optimizer._begin()
    return optimizer


def partial(optimizer: Any, local_layers: Any) -> Any:
    """Lets gradients of these layers stay on their ranks."""
    for variable in weights_of(local_layers):
        optimizer.register_local_var(variable)
    return optimizer


def _class_below(kind: type, mixin: type, how: tuple[Any, ...]) -> type:
    below = type(kind.__name__, (mixin, kind), {"_hvd_how": how})
    below.__qualname__ = kind.__qualname__
    # Where a saved model looks for it.
    path = getattr(kind, "__module__", "")
    exported = path.startswith("keras.src.") and getattr(keras.optimizers, kind.__name__, None)
    below.__module__ = "keras.optimizers" if exported is kind else path
    below.__doc__ = kind.__doc__
    # Saved under the name that the script has registered, which goes on to load the script's class.
    saving = (sys.modules["tf_keras"] if mixin is _Keras2 else keras).saving
    own = not path.startswith(("keras.", "tf_keras."))
    if own and (registered := saving.get_registered_name(kind)) != kind.__name__:
        loaded = saving.get_custom_objects()
        before = loaded.get(registered, kind)
        saving.register_keras_serializable(*registered.split(">", 1))(below)
        loaded[registered] = before
    return below


class _Distributed:
    """What both have: the class attribute `_hvd_how` says how."""

    _hvd_how: tuple[Reduction, int, bool]
    # Whether the script itself has gradients computed, and combined; then it may change them, by
    # clipping say, and what it applies is combined no more, as in Horovod.
    _computed_by_script = False
    _minimizing = False

    def _begin(self: Any) -> None:
        reduction, passes, average = self._hvd_how
        self._hvd = DistributedGradients(reduction)
        self._agg_helper = (
            LocalGradientAggregation(passes, self._hvd, average, keras_session)
            if passes > 1
            else None
        )
        keras_optimizer.mark_distributed(self, self._reduce_at_once)

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Made of a get_config(): distributed, too."""
        made = super().from_config(config, *args, **kwargs)  # type: ignore[misc]
        made._begin()
        return made

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        return type(self).from_config(self.get_config())

    def register_local_var(self: Any, var: Any) -> None:
        """From here on the gradient of this variable stays on its rank."""
        if rank() == 0 and getattr(self, "global_clipnorm", None) and not self._hvd.has_local:
            _warn(
                f"{type(self).__name__} clips by the norm of all gradients (global_clipnorm). "
                "Those of local variables differ from rank to rank, and with them the factor by "
                "which what all share is clipped: it drifts apart. Take clipnorm, which clips each "
                "gradient by its own norm."
            )
        self._hvd.register_local(var)

    def _reduce_at_once(self: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """For loss scaling, whose decision needs what all ranks have."""
        self._refuse_passes()
        return self._hvd.overflowing_alike(self._marked(gradients, variables), variables)

    def _refuse_passes(self: Any) -> None:
        if self._agg_helper is not None:
            raise ValueError(
                "backward_passes_per_step > 1 does not go together with loss scaling here: take "
                "mixed_bfloat16, which needs none."
            )

    def _allreduce(self: Any, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Gradients combined over the ranks, or the sums so far: what apply takes as it is."""
        if getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):  # of Keras 2
            self._refuse_passes()
            return self._hvd.overflowing_alike(list(grads), list(vars))
        combine = self._agg_helper.compute if self._agg_helper else self._hvd
        return list(combine(list(grads), list(vars)))

    def _compute_gradients(
        self: Any, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        """(gradient, variable) pairs, combined over the ranks.

        Args:
            loss: a function; or a tensor, with the tape that has recorded it.
            var_list: variables, or a function that gives them.
            grad_loss: the gradient of the loss, by default ones.
            tape: see loss; of a function it records the call.
        """
        if not self._minimizing:
            self._computed_by_script = True
        if callable(loss):
            tape = tf.GradientTape() if tape is None else tape
            with tape:
                loss = loss()
        variables = list(var_list() if callable(var_list) else var_list)
        gradients = tape.gradient(loss, variables, grad_loss)
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    def _marked(self: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """With marks on those that are combined already, also where the script has changed them."""
        marked, ranks = list(gradients), self._hvd.reduction.ranks
        for i, variable in enumerate(variables):
            by_tape = was_combined(variable, ranks)
            combined = self._computed_by_script or by_tape
            if combined is None and marked[i] is not None and not was_reduced(marked[i]):
                self._refuse_to_combine_again(variable)
            if not combined:
                continue
            if not isinstance(marked[i], (tf.Tensor, tf.IndexedSlices, type(None))):
                # An array has no marks; a variable that the script adds up in would keep its own.
                marked[i] = tf.convert_to_tensor(marked[i], dtype_hint=variable.dtype)
            if marked[i] is not None and not by_tape and not was_reduced(marked[i]):
                mark_summed(marked[i])  # made of what compute_gradients has returned
            mark_reduced(marked[i], ranks)
        return marked

    def _refuse_to_combine_again(self: Any, variable: Any) -> None:
        """Unless that would change nothing: an average of averages is what these are."""
        local = self._hvd.is_local(variable) or was_left_local(variable)
        if self._hvd.reduction.op != Average or self._agg_helper is not None or local:
            raise ValueError(
                f"{variable.name}: a DistributedGradientTape has computed its gradient, and so has "
                "a tape that is not distributed, one of them in a tf.function. Nobody can tell "
                "whether this gradient is combined already. Compute and apply it in one "
                "tf.function; or apply what a DistributedGradientTape has computed by an optimizer "
                "that is not distributed."
            )

    def _combined(self: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        marked: list[Any] = self._marked(gradients, variables)
        ranks = self._hvd.reduction.ranks
        if all(gradient is None or is_reduced(gradient, ranks) for gradient in marked):
            return marked
        return list(self._allreduce(marked, variables))

    def _update(self: Any, gradients: Sequence[Any], variables: Sequence[Any], update: Any) -> Any:
        # What the script has combined by itself, as by a tape, is applied at each pass.
        if self._agg_helper is None or not self._agg_helper.are_sums(gradients, variables):
            with keras_optimizer.within_apply():
                return update()
        with tf.init_scope():
            make_variables(self, variables)

        def once() -> Any:
            with keras_optimizer.within_apply():
                return update()

        counter = getattr(self, "_iterations", None)
        counter = self.iterations if counter is None else counter
        done = self._agg_helper.apply(gradients, variables, once, lambda: counter.assign_add(1))
        # In a graph of TensorFlow 1 it is the op that Keras runs.
        return None if tf.executing_eagerly() else done


class _Keras3(_Distributed):
    def __reduce__(self: Any) -> Any:
        """Pickles as an optimizer of Keras, as models are saved: its class is nowhere to be found.

        Keras gives a method of the class and arguments; see _class_below.
        """
        made, *rest = cast(tuple[Any, ...], super().__reduce__())
        return getattr(type(self).__bases__[1], made.__name__), *rest

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        """As that of Keras, of gradients combined over the ranks."""
        if keras_optimizer.reduced_outside(self):
            return super().apply(grads, trainable_variables)  # type: ignore[misc]
        variables = list(
            self._trainable_variables if trainable_variables is None else trainable_variables
        )
        combined = self._combined(list(grads), variables)
        # That of Keras adds up slices of a row from the first that were combined on.
        apply = super().apply  # type: ignore[misc]
        return self._update(combined, variables, lambda: apply(combined, variables))

    def _update_model_variables_moving_average(self: Any, trainable_variables: Any) -> None:
        """As that of Keras, whose averages are 0 until an update at iteration 0.

        Where passes are added up, the first update comes later; they begin there.
        """
        _, passes, _ = self._hvd_how
        adds_up = self._agg_helper is not None and self._agg_helper.adds_up
        if self.use_ema and adds_up:
            begins = self.iterations < passes
            averages = self._model_variables_moving_average
            for variable, average in zip(trainable_variables, averages, strict=False):
                if average is not None:
                    average.assign(tf.where(begins, variable, average))
        super()._update_model_variables_moving_average(trainable_variables)  # type: ignore[misc]


class _Keras2(_Distributed):
    def minimize(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As that of Keras, of gradients combined over the ranks."""
        with _minimizing(self):
            return super().minimize(*args, **kwargs)  # type: ignore[misc]

    def get_gradients(self: Any, loss: Any, params: Any) -> list[Any]:
        """As that of Keras's older optimizers in TensorFlow 1, combined over the ranks."""
        variables = tf.nest.flatten(params)
        gradients = super().get_gradients(loss, variables)  # type: ignore[misc]
        return list(self._allreduce(gradients, variables))

    def compute_gradients(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """As that of Keras, combined over the ranks."""
        return self._compute_gradients(loss, var_list, tape=tape)

    def apply_gradients(self: Any, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As that of Keras, of gradients combined over the ranks."""
        apply = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        combined = self._combined([gradient for gradient, _ in pairs], variables)
        together = list(zip(combined, variables, strict=True))
        return self._update(
            combined, variables, functools.partial(apply, together, *args, **kwargs)
        )

    def aggregate_gradients(self: Any, grads_and_vars: Iterable[Any]) -> list[Any]:
        """As that of Keras, of gradients combined over the ranks.

        Loss scaling calls it before it decides on the step, which ranks skip together.
        """
        aggregate = super().aggregate_gradients  # type: ignore[misc]
        return list(self._aggregated(grads_and_vars, aggregate))

    def _aggregate_gradients(self: Any, grads_and_vars: Iterable[Any]) -> list[Any]:
        aggregate = super()._aggregate_gradients  # type: ignore[misc]
        return list(self._aggregated(grads_and_vars, aggregate))

    def _aggregated(self: Any, grads_and_vars: Iterable[Any], aggregate: Any) -> list[Any]:
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        combined = self._combined([gradient for gradient, _ in pairs], variables)
        aggregated = list(aggregate(list(zip(combined, variables, strict=True))))
        for gradient, _ in aggregated:  # new tensors
            mark_reduced(gradient, self._hvd.reduction.ranks)
        return aggregated


@contextmanager
def _minimizing(optimizer: Any) -> Iterator[None]:
    """While Keras computes and applies: the script has not computed by itself."""
    optimizer._minimizing = True
    try:
        yield
    finally:
        optimizer._minimizing = False


@functools.cache
def _hook_loss_scaling_of_keras_2() -> None:
    # It computes and applies by the optimizer within. In between it makes new tensors, which would
    # be combined once more.
    for kind in sys.modules["tf_keras"].mixed_precision.LossScaleOptimizer.__subclasses__():
        kind.get_unscaled_gradients = keeping_marks(kind.get_unscaled_gradients)
        kind.minimize = _minimizing_within(kind.minimize)


def _minimizing_within(minimize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(minimize)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _minimizing(self.inner_optimizer):
            return minimize(self, *args, **kwargs)

    return run

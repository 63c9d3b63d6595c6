"""Optimizers of tf.compat.v1.train, whose gradients are combined over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from ddl_ops.gradients import (
    mark_reduced,
    name_in_order,
    note_explicit_averages,
    which_are_none,
)

from horovod.common.basics import Adasum, Average
from horovod.common.process_sets import number_of
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregation
from horovod.tensorflow.gradient_reduction import DistributedGradients, Reduction, groups_of
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set
from horovod.tensorflow.reductions import grouped_allreduce

v1 = tf.compat.v1


class _DistributedOptimizer(v1.train.Optimizer):
    """The optimizer within computes, applies and keeps its slots."""

    def __init__(
        self,
        optimizer: Any,
        reduce: DistributedGradients,
        name: str | None,
        use_locking: bool,
        aggregation: LocalGradientAggregation | None,
    ) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._reduce = reduce
        self._agg_helper = aggregation

    def register_local_var(self, var: Any) -> None:
        """From here on the gradient of this variable stays on its rank."""
        self._reduce.register_local(var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer within, combined over the ranks. A None must be None on all."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        note_explicit_averages("hvd.DistributedOptimizer")
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        combine = self._agg_helper.compute if self._agg_helper else self._reduce
        return list(zip(combine(gradients, variables), variables, strict=True))

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer within; after the passes between two updates it counts the step only.

        It gets the arguments as they are: one of the script's own may have others.
        """
        pairs = list(grads_and_vars)
        global_step = args[0] if args else kwargs.get("global_step")
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        adds_up = self._agg_helper is not None and self._agg_helper.are_sums(gradients, variables)
        for gradient in gradients:
            mark_reduced(gradient)  # by compute_gradients; `import ddl` shall not, once more

        def update() -> Any:
            return self._optimizer.apply_gradients(pairs, *args, **kwargs)

        def count() -> Any:
            return tf.no_op() if global_step is None else global_step.assign_add(1).op

        if self._agg_helper is None or not adds_up:
            return update()
        return self._agg_helper.apply(gradients, variables, update, count)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer within."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer within."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer within."""
        return self._optimizer.variables(*args, **kwargs)


class _DistributedAdasumOptimizer(v1.train.Optimizer):
    """The optimizer within updates each rank's variables by that rank's gradients alone.

    What has become of them since the ranks last had the same is combined by Adasum, every
    `passes` updates, and added to what they were then.
    """

    def __init__(
        self,
        optimizer: Any,
        compression: Any,
        name: str | None,
        use_locking: bool,
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        super().__init__(use_locking, name or f"DistributedDelta{type(optimizer).__name__}")
        self._optimizer = optimizer
        self._compression = compression
        self._passes = passes
        self._process_set = process_set

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer within."""
        pairs: list[tuple[Any, Any]] = self._optimizer.compute_gradients(*args, **kwargs)
        note_explicit_averages("hvd.DistributedOptimizer")
        return pairs

    def apply_gradients(self, grads_and_vars: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        """As the optimizer within, and then combined. Variables without a gradient stay.

        Ranks outside of the process set apply what they have. ValueError if it is not there.
        """
        number_of(self._process_set)
        pairs = list(grads_and_vars)
        for gradient, _ in pairs:
            mark_reduced(gradient)  # `import ddl` shall not average what is combined after it
        variables = [variable for gradient, variable in pairs if gradient is not None]
        with tf.init_scope() if tf.executing_eagerly() else contextlib.nullcontext():
            starts = [self._zeros_slot(one, "delta_start", self._name) for one in variables]
            updates = self._create_non_slot_variable(0, "updates", variables[0])
        begun = [
            start.assign(tf.where(tf.equal(updates, 0), one.read_value(), start.read_value()))
            for one, start in zip(variables, starts, strict=True)
        ]
        with tf.control_dependencies(_operations(begun)):
            updated = self._optimizer.apply_gradients(pairs, *args, **kwargs)

        def combine() -> Any:
            deltas = [
                one.read_value() - start.read_value()
                for one, start in zip(variables, starts, strict=True)
            ]
            if len(variables) < len(pairs):
                deltas.append(which_are_none([one for one, _ in pairs], deltas[0].dtype))
            combined = grouped_allreduce(
                deltas,
                compression=self._compression,
                op=Adasum,
                process_set=self._process_set,
                name=name_in_order(self._name),
            )
            done = []
            for one, start, delta in zip(variables, starts, combined, strict=False):
                new = start.read_value() + delta
                done += [start.assign(new), one.assign(new)]
            return tf.group(*_operations(done))

        with tf.control_dependencies(_operations([updated])):
            due = tf.equal((updates.read_value() + 1) % self._passes, 0)
            if not self._process_set.included():
                together = updated
            else:
                together = combine() if self._passes == 1 else tf.cond(due, combine, tf.no_op)
        with tf.control_dependencies(_operations([together])):
            return tf.group(*_operations([updates.assign_add(1)]))

    def get_slot(self, var: Any, name: str) -> Any:
        """As the optimizer within, and of what the variables were."""
        own = super().get_slot(var, name)
        return self._optimizer.get_slot(var, name) if own is None else own

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As get_slot."""
        return [*super().get_slot_names(), *self._optimizer.get_slot_names(*args, **kwargs)]

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As the optimizer within."""
        return self._optimizer.variables(*args, **kwargs)


def _operations(of: Iterable[Any]) -> list[Any]:
    """What to wait for; nothing in eager code, where all is done."""
    if tf.executing_eagerly():
        return []
    return [getattr(one, "op", one) for one in of if one is not None]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """An optimizer that combines gradients over the ranks before it applies them.

    Args:
        optimizer: of tf.compat.v1.train; or of Keras, which then becomes distributed itself (see
            horovod.tensorflow.keras).
        name: of the ops that apply; by default Distributed<class>.
        use_locking: of TensorFlow 1.
        device_dense: has no effect, nor has device_sparse.
        device_sparse: see above.
        compression: Compression.fp16 sends gradients as float16.
        sparse_as_dense: whether IndexedSlices are made dense before.
        backward_passes_per_step: gradients of so many passes are added up before.
        op: hvd.Average, or another. hvd.Adasum combines gradients for Keras, and for optimizers of
            tf.compat.v1.train, as Horovod, what updates by each rank's own gradients have made.
        gradient_predivide_factor: of an average: gradients are divided by it before the sum, and
            the average is multiplied by it.
        average_aggregated_gradients: whether the sums over passes are divided by their number.
        num_groups: checked, and without effect, as groups.
        groups: see above.
        process_set: the ranks that take part; others apply what they have.
        scale_local_gradients: whether those that stay on their ranks are divided by their number.

    Raises ValueError if it is no optimizer, or what is asked for does not go together.
    """
    del device_dense, device_sparse
    reduction = Reduction(
        name="DistributedOptimizer",
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups_of(num_groups, groups),
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("average_aggregated_gradients is part of an average: not for hvd.Adasum.")
    if op == Adasum and isinstance(optimizer, v1.train.Optimizer):
        return _DistributedAdasumOptimizer(
            optimizer, compression, name, use_locking, backward_passes_per_step, process_set
        )
    if isinstance(optimizer, v1.train.Optimizer):
        if backward_passes_per_step > 1 and v1.executing_eagerly_outside_functions():
            raise ValueError(
                "backward_passes_per_step > 1 is for TensorFlow 1 graphs with optimizers of "
                "tf.compat.v1.train. In eager code take one of Keras."
            )
        reduce = DistributedGradients(reduction)
        aggregation = (
            None
            if backward_passes_per_step == 1
            else LocalGradientAggregation(
                backward_passes_per_step, reduce, average_aggregated_gradients
            )
        )
        return _DistributedOptimizer(optimizer, reduce, name, use_locking, aggregation)
    from horovod._keras import optimizer as of_keras

    if not of_keras.is_keras_optimizer(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no optimizer of Keras, and none of "
            "tf.compat.v1.train. Pass one of them."
        )
    return of_keras.distribute(
        optimizer, reduction, backward_passes_per_step, average_aggregated_gradients
    )

"""What the callbacks do, without the Callback of a Keras; each class is mixed into that of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ddl_ops.environment import PLACEMENT
from ddl_ops.gradients import name_in_order
from ddl_ops.keras_callbacks import averaged_metrics
from ddl_ops.keras_optimizer import BROADCASTS

from horovod._keras.optimizer import keras_session, of_tf_train
from horovod.common.basics import Average, size
from horovod.tensorflow.functions import allgather_object, broadcast_variables
from horovod.tensorflow.mpi_ops import _allreduce
from horovod.tensorflow.util import key_of, keys_of

v1 = tf.compat.v1


def evaluated(tensor: Any) -> Any:
    """What it is now, as NumPy; in a session of TensorFlow 1 an op is run."""
    if tf.executing_eagerly():
        return tensor if tensor is None else tensor.numpy()
    return keras_session().run(tensor)


def variables_of(optimizer: Any) -> list[Any]:
    """Its slots, its step and the like; older Keras has a method for them."""
    if (of_train := of_tf_train(optimizer)) is not None:
        found = optimizer.variables() if isinstance(optimizer, v1.train.Optimizer) else None
        if found is None:  # Keras 2 has wrapped it
            found = [optimizer.iterations, *optimizer.optimizer.variables()]
        # As they were made, for ranks may have other names. In eager code there is no list of all.
        slots = [slot for of_kind in of_train._slots.values() for slot in of_kind.values()]
        made = v1.global_variables() or [*of_train._non_slot_variables(), *slots]
        order = {key_of(one): number for number, one in enumerate(made)}
        return sorted(found, key=lambda one: order.get(key_of(one), len(order)))
    found = optimizer.variables
    return list(found if isinstance(found, (list, tuple)) else found())


class BroadcastGlobalVariables:
    """After the first batch, when all are made, ranks get one rank's weights and optimizer state.

    In graphs of TensorFlow 1 also the other global variables that are initialised on all ranks.
    States of random generators stay as they are, so that ranks drop different units.
    """

    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """Takes the values of rank `root_rank`.

        Args:
            root_rank: whose.
            device: has no effect.
            local_variables: one or several, that stay as they are.
        """
        super().__init__()
        del device
        self.root_rank = root_rank
        self.broadcast_done = False
        if local_variables is None:
            local_variables = []
        elif not isinstance(local_variables, (list, tuple, set)):
            local_variables = [local_variables]
        self._local = keys_of(local_variables)
        setattr(self, BROADCASTS, True)

    def register_local_var(self, var: Any) -> None:
        """This variable stays as it is."""
        self._local |= keys_of([var])

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Once."""
        if self.broadcast_done:
            return
        variables = [*self.model.weights, *variables_of(self.model.optimizer)]
        if not tf.executing_eagerly():
            variables += self._beside(variables)
        alike = [one for one in variables if key_of(one) not in self._local]
        evaluated(broadcast_variables(alike, self.root_rank))
        self.broadcast_done = True

    def _beside(self, variables: list[Any]) -> list[Any]:
        """The other global variables that are initialised on all ranks, in rank root_rank's order.

        They are known by their names, types and shapes. Some ranks may have more, as those of a
        model with which one rank evaluates.
        """
        known = keys_of(variables) | self._local
        others = [one for one in v1.global_variables() if key_of(one) not in known]
        session = keras_session()
        bare = set(session.run(v1.report_uninitialized_variables(others)))
        mine = {
            (one.name, one.dtype.base_dtype.name, str(one.shape)): one
            for one in others
            if one.op.name.encode() not in bare
        }
        name = "BroadcastGlobalVariablesCallback"
        of_ranks = allgather_object(list(mine), session, name)
        of_all = set(mine).intersection(*of_ranks)
        return [mine[one] for one in of_ranks[self.root_rank] if one in of_all]


class MetricAverage:
    """Averages the metrics of each epoch over the ranks; all ranks must have the same ones.

    A metric may be an array: each element is averaged.

    Place it before callbacks that read metrics.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts the averages in the place of this rank's."""
        if not logs:
            return

        def average(values: tf.Tensor) -> Any:
            # By its name alone it would be another model's, too, that a thread trains beside it.
            name = name_in_order("MetricAverageCallback")
            return evaluated(_allreduce(values, name=name, op=Average))

        logs.update(averaged_metrics(logs, average))


class LearningRateSchedule:
    """Sets the learning rate to initial_lr * multiplier, from one epoch to another."""

    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        initial_lr: float | None = None,
        multiplier: float | Callable[[float], float] | None = None,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """From `start_epoch` on, and before `end_epoch`.

        Args:
            initial_lr: of the training without schedule; None: the optimizer's when it begins, as
                before Horovod 0.20.
            multiplier: a function of the epoch; or a number, to the power of the epochs since
                `start_epoch`.
            start_epoch: from 0.
            end_epoch: None: to the end.
            staircase: whether it changes with the epochs only, or with each batch, when the
                function is given the epoch with a fraction.
            momentum_correction: whether the momentum is scaled as the rate is, for the batch at
                which that changes; only for optimizers that keep it in a variable.
            steps_per_epoch: where Keras does not know.

        Raises ValueError without a multiplier.
        """
        super().__init__()
        if multiplier is None or callable(initial_lr):
            raise ValueError(
                f"{type(self).__name__} needs multiplier=, after initial_lr or by its name."
            )
        self.initial_lr = initial_lr
        self._asks_for_rate = initial_lr is None
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self.current_epoch = 0
        self._momentum: Any = None  # as it was, while it is corrected

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Asks for the rate, and for the number of steps, if they are needed."""
        if self._asks_for_rate:
            self.initial_lr = self._rate()
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch and self.params.get("batch_size"):  # Keras 2 in a graph
            self.steps_per_epoch = self.params.get("samples", 0) // self.params["batch_size"]
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__}: Keras does not know how many steps an epoch has. Pass "
                "steps_per_epoch=."
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """An epoch begins."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the rate, where it changes."""
        if self.current_epoch < self.start_epoch or (
            self.end_epoch is not None and self.current_epoch >= self.end_epoch
        ):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """The momentum is what it was."""
        if self._momentum is not None:
            _assign(self.model.optimizer.momentum, self._momentum)
            self._momentum = None

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate as `lr`."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(evaluated(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        assert self.initial_lr is not None
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and hasattr(momentum, "assign") and old:
            self._momentum = float(evaluated(momentum))
            _assign(momentum, self._momentum * new / old)


def _assign(variable: Any, value: float) -> None:
    if tf.executing_eagerly():
        variable.assign(value)
    else:
        v1.keras.backend.set_value(variable, value)


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate batch by batch from initial_lr / size to initial_lr."""

    def __init__(
        self,
        initial_lr: float | None = None,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """In so many epochs.

        Args:
            initial_lr: in the end; None: see LearningRateSchedule.
            warmup_epochs: epochs.
            momentum_correction: see LearningRateSchedule.
            steps_per_epoch: where Keras does not know.
            verbose: 1: rank 0 says when it is done.
        """

        def multiplier(epoch: float) -> float:
            # Up to the end of the batch, so that the last one has the whole rate.
            assert self.steps_per_epoch is not None
            done = epoch + 1 / self.steps_per_epoch
            return (done * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(
            initial_lr,
            multiplier,
            0,
            warmup_epochs,  # type: ignore[arg-type]  # compared only
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the rate as `lr`."""
        super().on_epoch_end(epoch, logs)
        done = self.end_epoch is not None and epoch == self.end_epoch - 1
        if done and self.verbose and PLACEMENT.rank == 0:
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}."
            )


class BestModel:
    """Rank 0 saves the model, whole or not at all, when it is better than before.

    Mixed into ModelCheckpoint.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        """As ModelCheckpoint(save_best_only=True), in $CHECKPOINT_DIR or the current folder.

        Its attribute `filepath` may be set to another place before fit().
        """
        name = f"model-best{'.weights.h5' if save_weights_only else '.keras'}"
        super().__init__(
            os.path.join(os.environ.get("CHECKPOINT_DIR") or ".", name),  # type: ignore[call-arg]
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )

    def _save_model(self, epoch: int, batch: int | None, logs: Any) -> None:
        if PLACEMENT.rank == 0:
            self._made: tuple[str, str] | None = None
            super()._save_model(epoch, batch, logs)  # type: ignore[misc]
            if self._made is not None:
                with contextlib.suppress(FileNotFoundError):  # it was no better
                    os.replace(*self._made)

    def _get_file_path(self, *args: Any, **kwargs: Any) -> str:
        path: str = super()._get_file_path(*args, **kwargs)  # type: ignore[misc]
        if not path.endswith((".keras", ".h5")):  # Keras 2 has formats of several files
            return path
        # With the same end, by which Keras knows how to write it.
        folder, name = os.path.split(path)
        partial = os.path.join(folder, f".partial-{name}")
        with contextlib.suppress(FileNotFoundError):  # of one that was killed
            os.unlink(partial)
        self._made = partial, path
        return partial


class _AskedByKeras2:
    """Whether a callback is called for each batch, which Keras 3 does not ask, and always does."""

    def _implements_train_batch_hooks(self) -> bool:
        return True

    _implements_test_batch_hooks = _implements_train_batch_hooks
    _implements_predict_batch_hooks = _implements_train_batch_hooks


def made(mixin: type, base: type, name: str, module: str) -> Any:
    """The class `module.name`: what `mixin` does, as a `base` of one Keras, for both."""
    facts = {"__doc__": mixin.__doc__, "__module__": module}
    return type(name, (mixin, base, _AskedByKeras2), facts)


def callbacks_of(keras: Any, module: str) -> tuple[Any, ...]:
    """Those of one Keras, as classes of `module`, in the order of its __all__."""
    base = keras.callbacks.Callback
    return (
        made(BestModel, keras.callbacks.ModelCheckpoint, "BestModelCheckpoint", module),
        made(BroadcastGlobalVariables, base, "BroadcastGlobalVariablesCallback", module),
        made(LearningRateSchedule, base, "LearningRateScheduleCallback", module),
        made(LearningRateWarmup, base, "LearningRateWarmupCallback", module),
        made(MetricAverage, base, "MetricAverageCallback", module),
    )

"""Keras 3 callbacks for training on several ranks."""

from __future__ import annotations

import json
import os
import re
import string
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras  # noqa: TID253
import numpy as np
import tensorflow as tf  # noqa: TID253

from ddl_ops import progress
from ddl_ops.checkpoints import newest_best, note_epochs, noted_best
from ddl_ops.collectives import allreduce_n, barrier, bcast, join
from ddl_ops.environment import PLACEMENT, checkpoint_folder
from ddl_ops.equal_settings import require_equal_settings
from ddl_ops.equal_weights import (
    common_path,
    mark_equal,
    path_of,
    require_equal,
    require_equal_adapted,
)
from ddl_ops.gradients import name_in_order
from ddl_ops.keras_optimizer import (
    BROADCASTS,
    COMPARES,
    JOINS,
    averages_by_itself,
    is_distributed,
    waiting_gradients,
)

# On a train_function that passes over batches that were done: weights do not change meanwhile.
PASSES_OVER = "_ddl_passes_over"
_STOPPED_ALONE = (
    "Does each rank's val_loss differ? Put ddl.keras.MetricAverageCallback before EarlyStopping, "
    "so that all ranks stop together; and give all ranks the same epochs. TerminateOnNaN stops the "
    "rank alone whose own loss is NaN."
)


def broadcast_variables(variables: Sequence[Any], root: int = 0) -> None:
    """Gives every rank the values that `root`'s `variables` (Keras or TensorFlow) have. Collective.

    Raises InvalidArgumentError on every rank, naming the variable, if ranks have other variables.
    """

    for place, variable in enumerate(variables):
        value = variable.value if isinstance(variable, keras.Variable) else variable
        path = path_of(variable)
        # What a name of an op may have, once in a graph.
        name = f"ddl_bcast/{place}/{re.sub(r'[^A-Za-z0-9_./>-]', '_', common_path(path))}"
        ordered = name_in_order(name)
        try:
            value.assign(bcast(value, ordered, root))
        except tf.errors.InvalidArgumentError as error:
            said = error.message.replace(f'"{name}"', f'"ddl_bcast/{path}"')
            if ordered is None:  # in a thread of the script's
                said = f"{path}: {said}"
            raise tf.errors.InvalidArgumentError(None, None, said) from None
    mark_equal(variables)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """compile()'s optimizer, and those that are attributes of the model and its parts, as a GAN's.

    In the same order on all ranks. One within loss scaling is a part of that, and not named.
    """
    found: dict[int, keras.optimizers.Optimizer] = {}
    kept = [model.optimizer]
    for part in model._flatten_layers():
        for value in vars(part).values():
            many = value.values() if isinstance(value, dict) else value
            kept += many if isinstance(value, (dict, list, tuple)) else [value]
    for one in kept:
        if isinstance(one, keras.optimizers.Optimizer):
            found[id(one)] = one
    within = {id(getattr(one, "inner_optimizer", None)) for one in found.values()}
    return [one for key, one in found.items() if key not in within]


def averaged_metrics(
    logs: Mapping[str, Any], average: Callable[[tf.Tensor], Any]
) -> dict[str, Any]:
    """The metrics of `logs`, by name, averaged over the ranks. Collective.

    Args:
        logs: at least one number or array; every rank has the same names and shapes.
        average: averages a float64 vector over the ranks, and returns it as NumPy.

    Numbers become floats, arrays float64 arrays of the same shape.
    """
    names = sorted(logs)
    values = [np.asarray(logs[name], np.float64) for name in names]
    averages = average(tf.constant(np.concatenate([value.ravel() for value in values])))
    parts = np.split(averages, np.cumsum([value.size for value in values])[:-1])
    return {
        name: part.reshape(value.shape) if value.ndim else float(part[0])
        for name, value, part in zip(names, values, parts, strict=True)
    }


def _has_numbers(value: Any) -> bool:
    """Callbacks of the script's own may put texts, and what not, among the metrics."""
    return np.asarray(value).dtype.kind in "biufV"  # V: bfloat16


def _require_equal_vocabularies(model: keras.Model) -> None:
    """What adapt() has learnt that is no variable, so cannot be broadcast. Collective."""
    # Not where this is imported: the Keras of TensorFlow 1 scripts has none.
    lookups = (
        keras.layers.TextVectorization,
        keras.layers.StringLookup,
        keras.layers.IntegerLookup,
    )
    layers, learnt = [], []
    for layer in model._flatten_layers():
        if isinstance(layer, lookups):
            weights = getattr(getattr(layer, "_lookup_layer", layer), "idf_weights_const", [])
            learnt.append([layer.get_vocabulary(), np.asarray(weights).tolist()])
            layers.append(layer.name)
        elif isinstance(layer, keras.layers.Discretization):
            learnt.append(layer.bin_boundaries)
            layers.append(layer.name)
    require_equal_adapted(layers, learnt)


class BroadcastCallback(keras.callbacks.Callback):
    """Starts training from rank 0's weights and optimizer state on every rank.

    Each epoch ends with a comparison of its number of steps: where ranks have different ones, fit()
    raises InvalidArgumentError on every rank, and batches of different epochs are never averaged.
    JoinCallback lets numbers differ.

    States of random generators stay as they are, so that ranks drop different units. Does nothing
    outside mpirun. fit() raises RuntimeError if the model has no weights yet or its optimizer does
    not average gradients (a model with a train_step() of its own may do so itself), and on every
    rank InvalidArgumentError if models differ, ModelsDifferError if vocabularies of layers do,
    SettingsDifferError if settings of optimizers do.
    """

    # Keras may call on_train_batch_end from threads of its own, and need not wait for the loss.
    async_safe = True

    def __init__(self) -> None:
        super().__init__()
        setattr(self, BROADCASTS, True)
        setattr(self, COMPARES, True)
        self._steps = 0
        self._counting = threading.Lock()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        if not PLACEMENT.launched:
            return
        # Nobody calls a model as a whole that only has others as its parts, as a GAN.
        unbuilt = [part.name for part in self.model._flatten_layers(False) if not part.built]
        if not self.model.built and (unbuilt or not self.model.weights):
            missing = f": its layer {unbuilt[0]!r} is not built" if unbuilt else ""
            raise RuntimeError(
                f"BroadcastCallback: the model has no weights yet{missing}. Give its first layer "
                "an input shape (keras.Input), or call the model, or each of its parts, once "
                "before fit()."
            )
        own_step = averages_by_itself(self.model)
        if PLACEMENT.size > 1 and not own_step and not is_distributed(self.model.optimizer):
            raise RuntimeError(
                f"BroadcastCallback: the model's optimizer {self.model.optimizer.name!r} does not "
                "average gradients over the ranks, so each rank would train a model of its own. "
                "An optimizer that was loaded with its model has to be distributed again: "
                "model.compile(ddl.keras.DistributedOptimizer(model.optimizer), ...)"
            )
        _require_equal_vocabularies(self.model)
        require_equal_settings(optimizers_of(self.model))
        self._broadcast(root=0)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        with self._counting:
            self._steps = max(self._steps, batch + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if PLACEMENT.launched:
            barrier(f"the end of epoch {epoch + 1} after {self._steps} steps", self._cure())

    def _cure(self) -> str:
        """What to do where ranks have done different numbers of steps."""
        steps = (self.params or {}).get("steps")
        if getattr(self.model, "stop_training", False) and (not steps or self._steps < steps):
            return (
                f"Rank {PLACEMENT.rank} has stopped in the middle of the epoch: by TerminateOnNaN, "
                "or another callback that looks at its own loss. Find out what is wrong with that "
                "loss, or let all ranks stop after the same step: average it by ddl.allreduce."
            )
        return (
            "Give all ranks the same number of steps in each epoch (steps_per_epoch=, or "
            "dataset.take()), or put ddl.keras.JoinCallback in the place of BroadcastCallback."
        )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if PLACEMENT.size > 1:
            barrier("the end of fit()", _STOPPED_ALONE)
            if getattr(self, COMPARES) and not averages_by_itself(self.model):
                require_equal(self.model.trainable_variables)

    def _broadcast(self, root: int) -> None:
        optimizers = optimizers_of(self.model)
        states = [one for each in optimizers for one in each.variables]
        own = [
            (each, int(each._iterations), [(one, keras.ops.copy(one)) for one in waiting])
            for each in optimizers
            if (waiting := waiting_gradients(each))
        ]
        adapted = [
            layer
            for layer in self.model._flatten_layers()
            if isinstance(layer, keras.layers.Normalization)
        ]
        statistics = [one for layer in adapted for one in layer.weights]
        before = [one.numpy() for one in statistics]
        broadcast_variables([*self.model.weights, *states], root)
        if not all(map(np.array_equal, statistics, before)):
            # It computes with constants that adapt() has made of these, and so do functions that
            # were traced before.
            for layer in adapted:
                layer.finalize_state()
            self.model.make_train_function(force=True)
            self.model.test_function = self.model.predict_function = None
        for optimizer, passes, gradients in own:
            if int(optimizer._iterations) == passes:  # else this rank is not where the root is
                for variable, gradient in gradients:
                    variable.assign(gradient)


class JoinCallback(BroadcastCallback):
    """As BroadcastCallback, for ranks with different numbers of steps in an epoch.

    A rank without data waits at the end of the epoch, before fit() validates, and before other
    callbacks see that end, wherever this one is placed. The averages of the others are then over
    those that still have some, and when the last rank is done, all go on with its weights and
    optimizer state.
    """

    def __init__(self) -> None:
        super().__init__()
        setattr(self, JOINS, self._join)
        self._joined = False  # in this epoch
        self._validates = False

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        # An evaluate() that is given this callback sets the model, too; fit()'s validation does
        # not, and it alone comes at the end of an epoch.
        self._validates = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._validates = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._joined = False

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._validates:
            self._join()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._join()
        self._joined = False  # a loop of the script's own may call nothing else

    def _join(self) -> None:
        if PLACEMENT.launched and not self._joined:
            self._broadcast(root=join())
            self._joined = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of each epoch over the ranks, so that all ranks act on the same.

    Place it before callbacks that read metrics (EarlyStopping, ReduceLROnPlateau): a rank that
    stops alone fails the others. Every rank must have the same metrics; ranks count equally, but
    one that had no batch in an epoch counts for validation alone, and is given the averages of the
    others. A metric may be an array, as of keras.metrics.F1Score(average=None): each element is
    averaged. What has no numbers, as texts of a callback, stays the rank's own.
    """

    async_safe = True  # as BroadcastCallback

    def __init__(self) -> None:
        super().__init__()
        self._trained = False

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._trained = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._trained = True

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not PLACEMENT.launched or logs is None:
            return
        trained = self._trained
        arrays = {name: np.asarray(value) for name, value in logs.items()}
        shapes = {name: value.shape for name, value in arrays.items() if _has_numbers(value)}
        text = json.dumps(shapes).encode() if trained else b""
        lengths = np.zeros(PLACEMENT.size, np.int64)
        lengths[PLACEMENT.rank] = len(text)
        (lengths,) = _sums([tf.constant(lengths)])
        if lengths.any() and not lengths.all():
            root = int(np.flatnonzero(lengths)[0])
            text = text if PLACEMENT.rank == root else bytes(lengths[root])
            told = tf.constant(np.frombuffer(text, np.uint8))
            text = bcast(told, name_in_order("ddl_metrics_names"), root).numpy().tobytes()
            if not trained:
                shapes = {name: tuple(shape) for name, shape in json.loads(text).items()}
        else:
            trained = True  # all have; or none, as where a loop of the script's own calls this
        if not shapes:
            return
        # Keras has zeros for a metric that no batch has updated. Validation needs none.
        counts = {
            name: (trained or name.startswith("val_"))
            and name in arrays
            and arrays[name].shape == shape
            for name, shape in shapes.items()
        }
        values = {
            name: arrays[name] if counts[name] else np.zeros(shape)
            for name, shape in shapes.items()
        }

        def average(values: tf.Tensor) -> Any:
            sizes = [np.full(shapes[name], counts[name]).ravel() for name in sorted(shapes)]
            total, ranks = _sums([values, tf.constant(np.concatenate(sizes), tf.float64)])
            return total / ranks

        logs.update(averaged_metrics(values, average))


def _sums(values: Sequence[tf.Tensor]) -> list[Any]:
    """Sums over the ranks of what belongs to the metrics of an epoch, as NumPy."""
    name = name_in_order("ddl_metrics")
    return [total.numpy() for total in allreduce_n(values, average=False, name=name)]


class CheckpointCallback(keras.callbacks.ModelCheckpoint):
    """keras.callbacks.ModelCheckpoint, on rank 0 only, and each file whole or not at all.

    A file is written under another name, `.partial-…`, and renamed: whoever is killed meanwhile
    leaves the one before as it was. Place it after MetricAverageCallback if it monitors a metric.

    Each `.keras` file notes how many epochs are done, for ddl.keras.newest_checkpoint(): its name
    may be any. With `save_best_only` it notes how good it is, too: a fit() that goes on with a
    later epoch saves no worse one after it. One that begins with the first does not ask, and files
    with another end, as those of weights alone, tell nothing.

    Args:
        filepath: as ModelCheckpoint's, but that `{epoch}` counts the epochs that are done, also
            where `save_freq` saves in the middle of one; by default `model-{epoch}.keras`, or
            `model-{epoch}.weights.h5` with save_weights_only, in $CHECKPOINT_DIR: where the train
            task looks for checkpoints to go on from, and for the model.
        options: as ModelCheckpoint's.

    Raises ValueError if there is neither filepath nor CHECKPOINT_DIR; else as ModelCheckpoint.
    """

    best: Any  # ModelCheckpoint's

    def __init__(
        self, filepath: str | os.PathLike[str] | None = None, *args: Any, **options: Any
    ) -> None:
        if filepath is None:
            folder = checkpoint_folder("CheckpointCallback")
            weights_only = options.get("save_weights_only", args[3] if len(args) > 3 else False)
            name = f"model-{{epoch}}{'.weights.h5' if weights_only else '.keras'}"
            # The folder's own braces are no fields of the name.
            filepath = os.path.join(folder.replace("{", "{{").replace("}", "}}"), name)
        super().__init__(filepath, *args, **options)
        self._begins = False
        self._best_before: float | None = None  # of an earlier process

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if self._begins and epoch > 0 and self.save_best_only and PLACEMENT.rank == 0:
            self._best_before = self._noted_best()
        self._begins = False

    def _noted_best(self) -> float | None:
        path = ""
        for text, field, *_ in string.Formatter().parse(self.filepath):
            path += text
            if field is not None:  # others may save in the folder, too, and note no best
                return newest_best(Path(os.path.dirname(path)), self.monitor)
        return noted_best(Path(path), self.monitor)

    def _take_best_before(self) -> None:
        """As soon as Keras can tell which of two values is the better one."""
        before, self._best_before = self._best_before, None
        if before is None:
            return
        if self.monitor_op is None:
            self._set_monitor_op()
        if self.best is None or self.monitor_op(before, self.best):
            self.best = before

    def _save_model(self, epoch: int, batch: int | None, logs: dict[str, Any] | None) -> None:
        if PLACEMENT.rank != 0:
            return
        if batch is not None and hasattr(self.model.train_function, PASSES_OVER):
            return
        # Keras counts the epoch that it is in; a try that goes on would leave out the rest of it.
        done = epoch + (batch is None or batch + 1 == (self.params or {}).get("steps"))
        path = self._get_file_path(done - 1, batch, logs or {})
        self._take_best_before()
        if not self._should_save_model(epoch, batch, logs, path):
            return
        folder, name = os.path.split(path)
        os.makedirs(folder or ".", exist_ok=True)
        # With the same end, by which Keras knows how to write it.
        partial = os.path.join(folder, f".partial-{name}")
        save = self.model.save_weights if self.save_weights_only else self.model.save
        save(partial, overwrite=True)
        if partial.endswith(".keras"):
            value = (logs or {}).get(self.monitor)
            best = None
            if self.save_best_only and value is not None and np.ndim(value) == 0:
                best = {self.monitor: float(value)}
            note_epochs(partial, done, best)
        os.replace(partial, path)
        if self.verbose:
            print(f"\nEpoch {epoch + 1}: saved {path}", flush=True)


class ProgressCallback(keras.callbacks.Callback):
    """Rank 0 appends progress lines to DDL_PROGRESS: step, steps, epoch, loss and all metrics.

    What is no number is left out, as metrics that are arrays.

    Args:
        steps: steps of the whole training; None: epochs times steps of an epoch, where known.
        every: seconds between two lines; each epoch's end has its own line.
        batch_size: examples of one rank in one step; adds `examples_per_s` over all ranks.

    Does nothing on other ranks or without DDL_PROGRESS.
    """

    def __init__(
        self, steps: int | None = None, every: float = 1.0, batch_size: int | None = None
    ) -> None:
        super().__init__()
        self._steps = steps
        self._every = every
        self._batch_size = batch_size
        self._epoch = 0
        self._step = 0
        self._step_before_epoch = 0
        self._written_at = time.monotonic()
        self._written_step = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._step = self._written_step = 0
        self._written_at = time.monotonic()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        # A resumed training starts at a later epoch.
        per_epoch = self.params.get("steps")
        self._step_before_epoch = epoch * per_epoch if per_epoch else self._step
        if self._step == 0:
            self._step = self._written_step = self._step_before_epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._step = self._step_before_epoch + batch + 1
        if time.monotonic() - self._written_at >= self._every:
            self._write(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._write(logs)

    def _write(self, logs: dict[str, Any] | None) -> None:
        now = time.monotonic()
        values: dict[str, Any] = {"step": self._step, "epoch": self._epoch + 1}
        per_epoch = self.params.get("steps")
        values["steps"] = self._steps or (per_epoch and per_epoch * self.params["epochs"])
        if self._batch_size and self._step > self._written_step:
            rate = (self._step - self._written_step) / max(now - self._written_at, 1e-6)
            values["examples_per_s"] = rate * self._batch_size * PLACEMENT.size
        self._written_at, self._written_step = now, self._step
        numbers = {
            name: float(np.asarray(value))
            for name, value in (logs or {}).items()
            if np.ndim(value) == 0 and _has_numbers(value)
        }
        progress.append({**numbers, **values}, source="keras")

"""The Keras callback that lets ranks be asked to end in the middle of an epoch, and go on there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras  # noqa: TID253

from ddl_ops import mid_epoch, preemption
from ddl_ops.arrays import barrier, have_joined
from ddl_ops.environment import PLACEMENT, checkpoint_folder
from ddl_ops.keras_callbacks import PASSES_OVER, optimizers_of
from ddl_ops.keras_optimizer import waiting_gradients
from ddl_ops.lifecycle import initialised

# Of a rank that is at another step than the others.
_ONE_STEP = (
    "Put ddl.keras.BroadcastCallback, or JoinCallback, before PreemptionCallback, so that each "
    "epoch begins with the same step on all ranks."
)


class PreemptionCallback(keras.callbacks.Callback):
    """Saves after the step at which any rank was asked to end, ends all ranks, and goes on there.

    The next try takes weights, optimizers (compile()'s, and attributes of the model), the ranks'
    random generators of Keras, and metrics of the epoch as they were, and passes over the batches
    of the epoch that are done: the input is read, and nothing is trained. So each step is done
    once. The weights are those of a training that nobody interrupted, bit for bit, if an epoch's
    batches are the same whenever it begins: files in their order, ``shuffle=False``, or an order
    that depends on seed and epoch. Not kept is what other callbacks count (EarlyStopping,
    ReduceLROnPlateau), and generators that are not Keras's.

    Pass ``initial_epoch`` to fit() as ``ddl.keras.newest_checkpoint()`` gives it. For one fit() in
    a script.

    Args:
        folder: where it is saved; None: CHECKPOINT_DIR.

    Raises ValueError if there is neither; fit() raises ValueError if what was saved is of another
    model, and RuntimeError if it begins with an epoch that was done.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._folder = Path(folder or checkpoint_folder("PreemptionCallback"))
        self._epoch = 0
        self._batch = 0
        self._step_before_epoch = 0
        self._first = True
        self._saved = 0  # the step that this try goes on from; nothing has been trained before it
        self._take_over: Callable[[], None] | None = None  # while batches are passed over

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._first = True
        self._saved = self._batch = self._step_before_epoch = 0
        preemption.save_by(self._save)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        # Not what an optimizer counts: a GAN has several, and loss scaling leaves out steps.
        done = max(self._step_before_epoch + self._batch, self._saved)
        if self._first:
            per_epoch = (self.params or {}).get("steps") or 0
            done = max(self._counted(), epoch * per_epoch)
        if self._first or have_joined():
            done = preemption.furthest(done)
        self._epoch, self._batch, self._step_before_epoch = epoch, 0, done
        if self._first:
            self._first = False
            self._go_on(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._batch = batch + 1
        step = self._step_before_epoch + self._batch
        if preemption.wanted(step, _ONE_STEP):
            # Batches that are passed over count as not done: what was saved after them is there.
            preemption.end(max(step, self._saved))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._trains()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        # The next fit() of this script, or the model it saves, goes on from more than that. One
        # that had no epoch left has not gone on from it: another fit() is to.
        if PLACEMENT.rank == 0 and not self._first:
            mid_epoch.remove(self._folder)

    def _counted(self) -> int:
        """The steps that compile()'s optimizer has counted, each pass of accumulation as one."""
        optimizer = self.model.optimizer
        return int(getattr(getattr(optimizer, "inner_optimizer", optimizer), "_iterations", 0))

    def _own(self) -> list[Any]:
        """What differs by rank: random generators and metrics."""
        common = {id(variable) for variable in self.model.weights}
        others = [one for one in self.model.variables if id(one) not in common]
        known = {id(one) for one in others}
        return others + [one for one in self.model.metrics_variables if id(one) not in known]

    def _waiting(self) -> list[Any]:
        """The gradients that this rank has added up since its optimizers' last steps."""
        return [one for each in optimizers_of(self.model) for one in waiting_gradients(each)]

    def _trained(self) -> mid_epoch.Trained:
        """Of each optimizer the numbers of the weights that it trains; None before its first."""
        numbers = {id(weight): number for number, weight in enumerate(self.model.weights)}
        trained: mid_epoch.Trained = []
        for optimizer in optimizers_of(self.model):
            inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
            weights = inner._trainable_variables if optimizer.built else None
            trained.append(weights and [numbers.get(id(weight)) for weight in weights])
        return trained

    def _common(self, path: Path | None = None) -> list[Any]:
        """Weights, and the state of the optimizers that have one; that had one in ``path``."""
        weights, optimizers = self.model.weights, optimizers_of(self.model)
        trained = mid_epoch.read_optimizers(path) if path else self._trained()
        if trained is None:  # of an earlier release, which kept no other
            optimizers = [self.model.optimizer]
            known = {id(one) for one in self.model.trainable_variables}
            trained = [[number for number, one in enumerate(weights) if id(one) in known]]
        if len(trained) != len(optimizers):
            raise ValueError(
                f"{path} is of a model with {len(trained)} optimizers, and this one has "
                f"{len(optimizers)}. Remove it to go on from a checkpoint."
            )
        variables = list(weights)
        for optimizer, numbers in zip(optimizers, trained, strict=True):
            if numbers is None:
                continue
            if not optimizer.built:
                if None in numbers:
                    raise ValueError(
                        f"{path}: the optimizer {optimizer.name!r} trains variables that are not "
                        "the model's weights. Call its build() with them before fit()."
                    )
                with contextlib.suppress(IndexError):  # of another model, which is found below
                    optimizer.build([weights[number] for number in numbers if number is not None])
            variables += optimizer.variables
        return variables

    def _trains(self) -> None:
        """From here on batches are trained with, also where there were fewer than had been done."""
        if self._take_over is not None:
            self._take_over()
            self._take_over = None

    def _save(self, step: int, saver: int) -> None:
        if step == self._saved:  # asked again, with no step done meanwhile, on any rank
            return
        self._trains()
        together = PLACEMENT.size > 1 and initialised()
        partial = mid_epoch.begin(self._folder, step)
        if together:
            barrier(f"{partial.name} is empty")
        if PLACEMENT.rank == saver:
            place = mid_epoch.Place(step, self._epoch, self._batch, PLACEMENT.size)
            mid_epoch.write_model(partial, place, self._common(), self._trained())
        mid_epoch.write_own(partial, PLACEMENT.rank, self._batch, self._own(), self._waiting())
        if together:
            barrier(f"all have written in {partial.name}")
            mid_epoch.gather(partial, saver)
        if PLACEMENT.rank == 0:
            mid_epoch.finish(partial, self._folder, step)

    def _go_on(self, epoch: int) -> None:
        """Takes what was saved, if that is newer than what the script has begun with."""
        found = mid_epoch.newest(self._folder)
        step = found[1].step if found else 0
        if (furthest := preemption.furthest(step)) != step:
            raise RuntimeError(
                f"rank {PLACEMENT.rank} does not find preempted-{furthest} in {self._folder} as "
                "another rank does. Let all ranks have the same folder, and be able to read it."
            )
        if found is None:
            return
        path, place = found
        if place.epoch < epoch:  # a checkpoint of a later epoch is there
            self._step_before_epoch = max(self._step_before_epoch, place.step)
            return
        if place.epoch > epoch:
            raise RuntimeError(
                f"fit() begins with epoch {epoch + 1}, and {path.name} has epoch {place.epoch} "
                "done. Give fit() the epoch: "
                "path, done = ddl.keras.newest_checkpoint(); model.fit(initial_epoch=done)."
            )
        # A checkpoint of the middle of the epoch, by save_freq, may be newer.
        if (counted := preemption.furthest(self._counted())) > place.step:
            if PLACEMENT.rank == 0:
                print(
                    f"ddl: does not go on from step {place.step}: the model that fit() begins "
                    f"with has {counted} done, and begins epoch {epoch + 1} anew",
                    flush=True,
                )
            return
        mid_epoch.read_model(path, self._common(path))
        self._step_before_epoch = place.step - place.batch
        if place.size != PLACEMENT.size:
            if PLACEMENT.rank == 0:
                print(
                    f"ddl: goes on from step {place.step} at the begin of epoch {epoch + 1}: there "
                    f"were {place.size} ranks, which had done {place.batch} batches of it.",
                    flush=True,
                )
            self._step_before_epoch = place.step
            return
        self._saved = place.step
        if PLACEMENT.rank == 0:
            print(f"ddl: goes on from step {place.step}", flush=True)
        left = mid_epoch.read_batch(path, PLACEMENT.rank, place)
        # One that had joined is to have those of the saver, as at the end of an epoch.
        self._pass_over(path, left, self._waiting() if left == place.batch else [])

    def _pass_over(self, path: Path, left: int, waiting: list[Any]) -> None:
        """Has fit() read the batches that this rank has done, and train with those after them."""
        if not left:
            return
        train = self.model.train_function
        batch: Any = None

        def restore() -> None:
            self._build_metrics(batch)
            mid_epoch.read_own(path, PLACEMENT.rank, self._own(), waiting)

        def take_over() -> None:
            self.model.train_function = train
            restore()

        def read_only(iterator: Any) -> dict[str, Any]:
            nonlocal left, batch
            first = batch is None
            for _ in range(min(left, self.model.steps_per_execution)):
                batch = next(iterator)
                left -= 1
            if not left:
                self._trains()
            elif first:  # callbacks look at the metrics of each batch
                restore()
            return dict(self.model.get_metrics_result())

        self._take_over = take_over
        setattr(read_only, PASSES_OVER, True)
        self.model.train_function = read_only

    def _build_metrics(self, batch: Any) -> None:
        """Those of compile() have variables from the first batch on that the model sees."""
        metrics = getattr(self.model, "_compile_metrics", None)
        if metrics is not None and not metrics.built and batch is not None:
            self.model._symbolic_build(data_batch=batch)

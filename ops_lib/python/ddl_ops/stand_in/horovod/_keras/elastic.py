"""The state of a Keras model; callbacks that commit it, and count what is done in it."""

from __future__ import annotations

from typing import Any

from horovod._keras.callbacks import made
from horovod.tensorflow.elastic import TensorFlowKerasState


class KerasState(TensorFlowKerasState):
    """State of a model and its optimizer; see TensorFlowKerasState."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitState:
    """Commits every so many batches, and at the end of each epoch.

    Args:
        state: a horovod.common.elastic.State.
        batches_per_commit: 0: at the ends of epochs only.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts from here."""
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """One batch is done."""
        if not self.batches_per_commit:
            return
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """One epoch is done."""
        self.commit()

    def commit(self) -> None:
        """Commits now."""
        self.state.commit()
        self.batches_remaining = self.batches_per_commit


class UpdateBatchState:
    """Keeps state.batch at the number of batches done in the epoch.

    Args:
        state: with an attribute `batch`.
    """

    params: dict[str, Any]

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Knows how many there are."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """An epoch that is gone on with has fewer batches."""
        if self.params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = self.params["steps"]
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """One batch is done."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The next one begins with its first batch."""
        self.state.batch = 0


class UpdateEpochState:
    """Keeps state.epoch at the number of epochs done, those of earlier starts included.

    Args:
        state: with an attribute `epoch`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Counts from there."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """One epoch is done."""
        self.state.epoch = self.initial_epoch + epoch + 1


def callbacks_of(keras: Any, module: str) -> tuple[Any, ...]:
    """Those of one Keras, as classes of `module`, in the order of its __all__."""
    base = keras.callbacks.Callback
    return (
        made(CommitState, base, "CommitStateCallback", module),
        made(UpdateBatchState, base, "UpdateBatchStateCallback", module),
        made(UpdateEpochState, base, "UpdateEpochStateCallback", module),
    )

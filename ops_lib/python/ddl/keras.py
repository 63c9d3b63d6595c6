"""Training of Keras 3 models on all ranks.

    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, callbacks=[ddl.keras.BroadcastCallback(), ddl.keras.ProgressCallback()])

Each rank must see its own part of the data, in the same number of steps; or take JoinCallback in
the place of BroadcastCallback.
"""

from __future__ import annotations

import os
from pathlib import Path

from ddl_ops import mid_epoch
from ddl_ops.arrays import say
from ddl_ops.batch_moments import hook_batch_normalization
from ddl_ops.checkpoints import newest_model
from ddl_ops.environment import PLACEMENT
from ddl_ops.keras_callbacks import (
    BroadcastCallback,
    CheckpointCallback,
    JoinCallback,
    MetricAverageCallback,
    ProgressCallback,
    broadcast_variables,
)
from ddl_ops.keras_optimizer import distribute as DistributedOptimizer
from ddl_ops.keras_optimizer import hook_compile
from ddl_ops.keras_preemption import PreemptionCallback
from ddl_ops.keras_weight_notes import hook_fit

__all__ = [
    "BroadcastCallback",
    "CheckpointCallback",
    "DistributedOptimizer",
    "JoinCallback",
    "MetricAverageCallback",
    "PreemptionCallback",
    "ProgressCallback",
    "broadcast_variables",
    "newest_checkpoint",
]

# Which a script that imports ddl before keras has not had yet.
hook_compile()
hook_fit()
hook_batch_normalization()


def newest_checkpoint(folder: str | os.PathLike[str] | None = None) -> tuple[Path | None, int]:
    """The newest model to go on from, and how many epochs are done; None and 0 in the first try.

    That is a file of CheckpointCallback, or any model-<epoch>.keras. Rank 0 says which newer ones
    are passed over, since nobody can tell their epochs.

    The optimizer of a model that is loaded has to be distributed again. Where PreemptionCallback
    has saved in the middle of a later epoch, the epoch is that one, from whose middle it goes on.

    Args:
        folder: to look in; None: CHECKPOINT_DIR, and no checkpoint without that.
    """
    if not (folder := folder or os.getenv("CHECKPOINT_DIR")):
        return None, 0
    found, passed_over = newest_model(Path(folder))
    if passed_over and PLACEMENT.rank == 0:
        say(
            f"WARNING: the training does not go on from {passed_over[0]}, which does not tell how "
            "many epochs are done. Save by ddl.keras.CheckpointCallback, which notes them in the "
            "file, or as model-<epoch>.keras."
        )
    path, done = (found.path, found.step or 0) if found else (None, 0)
    middle = mid_epoch.newest(Path(folder))
    return path, max(done, middle[1].epoch) if middle else done

"""Training of Keras 3 models on all ranks.

    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(1e-3))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, callbacks=[ddl.keras.BroadcastCallback(), ddl.keras.ProgressCallback()])

Each rank must see its own part of the data, in the same number of steps; or take JoinCallback in
the place of BroadcastCallback.
"""

from __future__ import annotations

from ddl_ops.keras_callbacks import (
    BroadcastCallback,
    JoinCallback,
    MetricAverageCallback,
    ProgressCallback,
    broadcast_variables,
)
from ddl_ops.keras_optimizer import distribute as DistributedOptimizer

__all__ = [
    "BroadcastCallback",
    "DistributedOptimizer",
    "JoinCallback",
    "MetricAverageCallback",
    "ProgressCallback",
    "broadcast_variables",
]

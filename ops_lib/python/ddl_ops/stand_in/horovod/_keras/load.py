"""Models whose optimizer is distributed again."""

from __future__ import annotations

from typing import Any

from horovod._keras.optimizer import distribute
from horovod.tensorflow.gradient_reduction import Reduction


def load_model(
    keras: Any,
    filepath: Any,
    custom_optimizers: Any,
    custom_objects: dict[str, Any] | None,
    compression: Any,
) -> Any:
    """What `keras` loads, with its optimizer, in the state it was saved in, distributed.

    Raises ValueError if the model was saved without one.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    known.update(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        raise ValueError(
            f"{filepath}: the model was saved without its optimizer. Load it with "
            "keras.models.load_model, and compile it with hvd.DistributedOptimizer(...)."
        )
    if not hasattr(optimizer, "_hvd"):
        distribute(optimizer, Reduction(name="DistributedOptimizer", compression=compression))
    return model

"""Models whose optimizer is distributed again."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ddl_ops.environment import PLACEMENT

from horovod._keras.optimizer import distribute
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_reduction import Reduction
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization


def load_model_of(keras: Any) -> Callable[..., Any]:
    """The function load_model for one Keras; where tf.keras is an older one, for both."""

    def load_model(
        filepath: Any,
        custom_optimizers: Any = None,
        custom_objects: dict[str, Any] | None = None,
        compression: Any = Compression.none,
        legacy_opts: bool = False,
    ) -> Any:
        """A saved model whose optimizer, in the state that it was saved in, is distributed again.

        Args:
            filepath: as keras.models.load_model's.
            custom_optimizers: classes of optimizers that Keras does not know.
            custom_objects: as keras.models.load_model's.
            compression: see DistributedOptimizer.
            legacy_opts: has no effect: the model says which they are.

        One that was saved without an optimizer comes as it is, and rank 0 says so.
        """
        del legacy_opts
        known: dict[str, Any] = {SyncBatchNormalization.__name__: SyncBatchNormalization}
        known.update({kind.__name__: kind for kind in custom_optimizers or ()})
        known.update(custom_objects or {})
        loader = keras
        if _is_keras_3(keras) and not _is_keras_3(tf.keras) and not _is_of_keras_3(filepath):
            loader = tf.keras
        model = loader.models.load_model(filepath, custom_objects=known)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None:
            if PLACEMENT.rank == 0:
                print(
                    f"ddl: rank 0: {filepath}: the model was saved without its optimizer. To train "
                    "it, compile it with hvd.DistributedOptimizer(...).",
                    file=sys.stderr,
                    flush=True,
                )
        elif not hasattr(optimizer, "_hvd"):
            distribute(optimizer, Reduction(name="DistributedOptimizer", compression=compression))
        return model

    return load_model


def _is_keras_3(keras: Any) -> bool:
    return str(keras.__name__).startswith("keras")


def _is_of_keras_3(filepath: Any) -> bool:
    """Whether that is what the file of a model says."""
    import h5py

    version: Any = ""  # of a folder, which Keras 3 does not make
    if not isinstance(filepath, str | os.PathLike):
        return False
    if zipfile.is_zipfile(filepath):
        with zipfile.ZipFile(filepath) as file:
            version = json.loads(file.read("metadata.json"))["keras_version"]
    elif h5py.is_hdf5(filepath):
        with h5py.File(filepath) as file:
            version = file.attrs.get("keras_version", "")
    return str(version).startswith("3.")

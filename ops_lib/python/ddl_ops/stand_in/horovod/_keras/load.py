"""Models whose optimizer is distributed again."""

from __future__ import annotations

import itertools
import json
import os
import zipfile
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from ddl_ops.arrays import say
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
                say(
                    f"{filepath}: the model was saved without its optimizer. To train it, compile "
                    "it with hvd.DistributedOptimizer(...)."
                )
            return model
        if _is_keras_3(loader) and optimizer.built and _is_hdf5(filepath):
            optimizer = model.optimizer = _restored(optimizer, model, filepath)
        if not hasattr(optimizer, "_hvd"):
            distribute(optimizer, Reduction(name="DistributedOptimizer", compression=compression))
        return model

    return load_model


def _restored(optimizer: Any, model: Any, filepath: Any) -> Any:
    """Another one, in the state that the file of a whole model has.

    Keras 3 builds the loaded one for variables of the model itself, without those of its layers, so
    that it trains nothing and has lost its state.
    """
    import h5py

    anew = type(optimizer).from_config(optimizer.get_config())
    anew.build(model.trainable_variables)
    with h5py.File(filepath) as file:
        kept = _in_order(file["optimizer_weights"])
        if [value.shape for value in kept] != [tuple(one.shape) for one in anew.variables]:
            if PLACEMENT.rank == 0:
                say(
                    f"{filepath} has no state of the optimizer for what the model trains, as where "
                    "it was saved before it was trained: the optimizer begins anew."
                )
            return anew
        for variable, value in zip(anew.variables, kept, strict=True):
            variable.assign(value[()])
    return anew


def _in_order(group: Any) -> list[Any]:
    """What Keras has put into a group of HDF5: long lists of names are in several attributes."""
    names = [*group.attrs.get("weight_names", ())]
    for number in itertools.count():
        if (more := group.attrs.get(f"weight_names{number}")) is None:
            break
        names += [*more]
    return [group[name] for name in names]


def _is_keras_3(keras: Any) -> bool:
    return str(keras.__name__).startswith("keras")


def _is_hdf5(filepath: Any) -> bool:
    """Whether it is the path of such a file."""
    import h5py

    return isinstance(filepath, str | os.PathLike) and bool(h5py.is_hdf5(filepath))


def _is_of_keras_3(filepath: Any) -> bool:
    """Whether that is what the file of a model says."""
    import h5py

    version: Any = ""  # of a folder, which Keras 3 does not make
    if not isinstance(filepath, str | os.PathLike):
        return False
    if zipfile.is_zipfile(filepath):
        with zipfile.ZipFile(filepath) as file:
            version = json.loads(file.read("metadata.json"))["keras_version"]
    elif _is_hdf5(filepath):
        with h5py.File(filepath) as file:
            version = file.attrs.get("keras_version", "")
    return str(version).startswith("3.")

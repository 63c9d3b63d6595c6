"""What a TensorFlow 1 script may ask for and cannot have, and what to use instead."""

from __future__ import annotations

import functools
import importlib.util

_LEGACY_PACKAGES = ("tf_keras", "tf_slim", "tensorflow_estimator")
# Of no index: a package of that name there would be somebody else's.
_LEGACY = "pip install './ops_lib[legacy]' in the sources of ddl-airflow"

# Absent unless the extra `legacy` is installed. A name stands for all that lies below it.
_NEEDS_LEGACY = {
    "tensorflow.contrib.framework": "tf_slim",
    "tensorflow.contrib.layers": "tf_slim",
    "tensorflow.contrib.learn": "tensorflow_estimator",
    "tensorflow.contrib.rnn": "Keras 2",
    "tensorflow.contrib.slim": "tf_slim",
    "tensorflow.estimator": "tensorflow_estimator",
    "tensorflow.keras": "Keras 2",
    "tensorflow.layers": "Keras 2",
    "tensorflow.nn.rnn_cell": "Keras 2",
}

_REPLACED = {
    "tensorflow.contrib.all_reduce": "ddl.allreduce_n, or tensorflow.contrib.mpi_collectives",
    "tensorflow.contrib.autograph": "tf.autograph",
    "tensorflow.contrib.bayesflow": "the package tensorflow_probability",
    "tensorflow.contrib.checkpoint": "tf.train.Checkpoint",
    "tensorflow.contrib.cluster_resolver": "tf.distribute.cluster_resolver",
    "tensorflow.contrib.crf": "code of your own: tensorflow_addons, which had it, has ended",
    "tensorflow.contrib.cudnn_rnn": "tf.keras.layers.CuDNNLSTM and CuDNNGRU",
    "tensorflow.contrib.data": "tf.data, whose transformations are in tf.data.experimental",
    "tensorflow.contrib.distribute": "ddl: one process for each device",
    "tensorflow.contrib.distributions": "the package tensorflow_probability",
    "tensorflow.contrib.eager": "tf.compat.v2; eager code is no TensorFlow 1 script",
    "tensorflow.contrib.estimator": "tf.estimator",
    "tensorflow.contrib.factorization": "scikit-learn",
    "tensorflow.contrib.feature_column": "tf.feature_column",
    "tensorflow.contrib.framework.argsort": "tf.argsort",
    "tensorflow.contrib.framework.init_from_checkpoint": "tf.train.init_from_checkpoint",
    "tensorflow.contrib.framework.is_tensor": "tf.is_tensor",
    "tensorflow.contrib.framework.sort": "tf.sort",
    "tensorflow.contrib.framework.CriticalSection": "tf.CriticalSection",
    "tensorflow.contrib.gan": "the package tensorflow_gan",
    "tensorflow.contrib.graph_editor": "tf.graph_util and tf.import_graph_def(input_map=...)",
    "tensorflow.contrib.image": "tf.image",
    "tensorflow.contrib.keras": "tf.keras",
    "tensorflow.contrib.layers.embed_sequence": "tf.nn.embedding_lookup of a tf.get_variable",
    "tensorflow.contrib.layers.embedding_lookup_unique": "tf.nn.embedding_lookup",
    "tensorflow.contrib.learn.datasets": "tensorflow.examples.tutorials.mnist.input_data for mnist",
    "tensorflow.contrib.legacy_seq2seq": "tf.nn.dynamic_rnn and tf.nn.raw_rnn",
    "tensorflow.contrib.lite": "tf.lite",
    "tensorflow.contrib.lookup": "tf.lookup.StaticHashTable and tf.lookup.StaticVocabularyTable",
    "tensorflow.contrib.losses": "tf.losses",
    "tensorflow.contrib.metrics": "tf.metrics",
    "tensorflow.contrib.nccl": "ddl.allreduce_n",
    "tensorflow.contrib.nn": "tf.nn",
    "tensorflow.contrib.opt": "an optimizer of tf.train, or tf.keras.optimizers",
    "tensorflow.contrib.predictor": "tf.saved_model.loader.load in a session",
    "tensorflow.contrib.quantize": "the package tensorflow_model_optimization",
    "tensorflow.contrib.rnn.Conv2DLSTMCell": "tf.keras.layers.ConvLSTM2D",
    "tensorflow.contrib.rnn.ConvLSTMCell": "tf.keras.layers.ConvLSTM2D",
    "tensorflow.contrib.rnn.GRUBlockCell": "tf.nn.rnn_cell.GRUCell",
    "tensorflow.contrib.rnn.GRUBlockCellV2": "tf.nn.rnn_cell.GRUCell",
    "tensorflow.contrib.rnn.LSTMBlockCell": "tf.nn.rnn_cell.LSTMCell",
    "tensorflow.contrib.rnn.LSTMBlockFusedCell": "tf.nn.rnn_cell.LSTMCell with tf.nn.dynamic_rnn",
    "tensorflow.contrib.rnn.LayerNormBasicLSTMCell": (
        "tf.nn.rnn_cell.LSTMCell, which does not normalize"
    ),
    "tensorflow.contrib.rnn.stack_bidirectional_dynamic_rnn": "tf.nn.bidirectional_dynamic_rnn",
    "tensorflow.contrib.saved_model": "tf.saved_model",
    "tensorflow.contrib.seq2seq": "tf.nn.dynamic_rnn: tensorflow_addons, which had it, has ended",
    "tensorflow.contrib.session_bundle": "tf.saved_model.loader",
    "tensorflow.contrib.signal": "tf.signal",
    "tensorflow.contrib.solvers": "tf.linalg",
    "tensorflow.contrib.stateless": "tf.random.stateless_uniform and its like",
    "tensorflow.contrib.summary": "tf.summary",
    "tensorflow.contrib.tensorboard": "the package tensorboard",
    "tensorflow.contrib.tensorrt": "tf.experimental.tensorrt of TensorFlow 2",
    "tensorflow.contrib.tfprof": "tf.profiler",
    "tensorflow.contrib.tpu": "tf.tpu",
    "tensorflow.contrib.training": "tf.train; for HParams argparse.Namespace",
    "tensorflow.contrib.util": "tf.make_tensor_proto, tf.make_ndarray",
    "tensorflow.contrib.verbs": "ddl over MPI",
    "tensorflow.examples.tutorials.mnist.mnist": "a model of the script's own",
    "tensorflow.python.estimator": "tf.estimator",
}


class LeftTensorFlow(AttributeError):
    """A script asks for what is gone. To try again, as it is, will not help: whoever started the
    job knows this by the name."""


@functools.cache
def has_legacy() -> bool:
    """Whether all of the extra `legacy` is installed: its parts need each other."""
    return all(importlib.util.find_spec(name) is not None for name in _LEGACY_PACKAGES)


def needs_legacy(name: str) -> str | None:
    """What to say of a name that the extra `legacy` would give; None if it would not."""
    package = _NEEDS_LEGACY.get(name)
    return f"{name} needs {package}: {_LEGACY}" if package else None


def no_attribute(module: str, name: str) -> AttributeError:
    """What to raise where a module of ``tensorflow.contrib`` does not have a name."""
    if name.startswith("__"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return LeftTensorFlow(left(f"{module}.{name}"))


def left(name: str) -> str | None:
    """What to say of what is not there; None if it was never in TensorFlow.

    Args:
        name: of a module or what is in one, from ``tensorflow.`` on.
    """
    if replacement := _REPLACED.get(name):
        return f"{name} is gone from TensorFlow. Use {replacement}."
    if name.startswith(("tensorflow.contrib.", "tensorflow.examples.")):
        return (
            f"{name} left TensorFlow with version 2, and TensorFlow 1 mode does not have it. See "
            "https://github.com/tensorflow/community/blob/master/rfcs/20180907-contrib-sunset.md "
            "for where each part went."
        )
    return None

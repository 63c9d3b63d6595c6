"""Trains 50 steps of each case by Horovod's interface, and leaves the weights.

    horovodrun -np 2 python script.py FOLDER [CASE ...]

Nothing in here knows which `horovod` it imports. Each rank writes FOLDER/CASE-RANK.npz: where its
weights began, and where they ended. Ranks begin with weights of their own, so that what is
broadcast counts, and have data of their own. All numbers come from NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import numpy as np
import tensorflow as tf  # noqa: TID253

STEPS = 50
BATCH, INPUTS, WORDS = 8, 6, 20
v1 = tf.compat.v1
keras = tf.keras


def batch(step: int) -> tuple[Any, Any, Any]:
    """Inputs, words and targets of this rank."""
    random = np.random.default_rng([hvd.rank(), step])
    x = random.normal(size=(BATCH, INPUTS))
    words = random.integers(0, WORDS, (BATCH, 3))
    return x, words, np.sin(x.sum(1, keepdims=True)) + words.mean(1, keepdims=True) / WORDS


def all_batches() -> tuple[Any, Any, Any]:
    """The same 50, one after another."""
    x, words, y = zip(*map(batch, range(STEPS)), strict=True)
    return np.concatenate(x), np.concatenate(words), np.concatenate(y)


def begun(shapes: Any, dtype: str = "float64") -> list[Any]:
    """Weights that this rank begins with."""
    random = np.random.default_rng([7, hvd.rank()])
    return [random.normal(size=tuple(shape), scale=0.3).astype(dtype) for shape in shapes]


def perceptron() -> Any:
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    model.set_weights(begun(w.shape for w in model.get_weights()))
    return model


def with_words() -> Any:
    """A layer whose gradients are IndexedSlices."""
    numbers, words = keras.Input((INPUTS,)), keras.Input((3,), dtype="int64")
    found = keras.layers.Flatten()(keras.layers.Embedding(WORDS, 4)(words))
    hidden = keras.layers.Dense(16, "tanh")(keras.layers.Concatenate()([numbers, found]))
    model = keras.Model([numbers, words], keras.layers.Dense(1)(hidden))
    model.set_weights(begun(w.shape for w in model.get_weights()))
    return model


def fitted(
    optimizer: Any, model: Any = None, callbacks: Any = (), epochs: int = 5, **how: Any
) -> tuple[list[Any], list[Any]]:
    """What `fit` makes of a model."""
    model = model or perceptron()
    before = model.get_weights()
    model.compile(hvd_keras.DistributedOptimizer(optimizer, **how), "mse")
    x, words, y = all_batches()
    inputs = [x, words] if len(model.inputs) == 2 else x
    steps = STEPS // epochs  # each epoch the first of them
    rows = slice(0, steps * BATCH)
    inputs = [one[rows] for one in inputs] if isinstance(inputs, list) else inputs[rows]
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    model.fit(inputs, y[rows], epochs=epochs, callbacks=callbacks, **options)
    return before, model.get_weights()


def stepped(
    model: Any = None,
    compiled: bool = True,
    wrap: Any = hvd.DistributedGradientTape,
    dtype: str = "float64",
    **how: Any,
) -> tuple[list[Any], list[Any]]:
    """What a loop of the script's own makes of a model, by a tape and with momentum."""
    model = model or perceptron()
    before = model.get_weights()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

    def step(*inputs: Any) -> None:
        *inputs, y = inputs
        with tf.GradientTape() as tape:
            said = model(inputs if len(inputs) > 1 else inputs[0], training=True)
            loss = tf.reduce_mean(tf.square(said - y))
        tape = wrap(tape, **how)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if compiled else step
    for number in range(STEPS):
        x, words, y = batch(number)
        given = [x, words, y] if len(model.inputs) == 2 else [x.astype(dtype), y.astype(dtype)]
        if number == 0:
            hvd.broadcast_variables(model.variables, root_rank=0)
        run(*map(tf.constant, given))
    return before, model.get_weights()


def session(
    optimizer: Any, *, sparse: bool = False, hook: bool = True, **how: Any
) -> tuple[list[Any], list[Any]]:
    """What a TensorFlow 1 graph and session make of it."""
    with tf.Graph().as_default():
        shapes = [(WORDS, 4), (INPUTS + 12, 16), (16,), (16, 1), (1,)]
        if not sparse:
            shapes = [(INPUTS, 16), *shapes[2:]]
        before = begun(shapes)
        variables = [v1.Variable(one) for one in before]
        x = v1.placeholder(tf.float64, [BATCH, INPUTS])
        words = v1.placeholder(tf.int64, [BATCH, 3])
        y = v1.placeholder(tf.float64, [BATCH, 1])
        layer, rest = x, variables
        if sparse:
            found = tf.reshape(tf.nn.embedding_lookup(variables[0], words), [BATCH, 12])
            layer, rest = tf.concat([x, found], 1), variables[1:]
        hidden = tf.tanh(tf.matmul(layer, rest[0]) + rest[1])
        loss = tf.reduce_mean(tf.square(tf.matmul(hidden, rest[2]) + rest[3] - y))
        step = v1.train.get_or_create_global_step()
        train = hvd.DistributedOptimizer(optimizer, **how).minimize(loss, global_step=step)
        hooks = [hvd.BroadcastGlobalVariablesHook(0)] if hook else []
        start = None if hook else hvd.broadcast_global_variables(0)
        with v1.train.MonitoredTrainingSession(hooks=hooks) as running:
            if start is not None:
                running.run(start)
            for number in range(STEPS):
                running.run(train, dict(zip((x, words, y), batch(number), strict=True)))
            return before, running.run(variables)


def warmup() -> Any:
    # Horovod 0.28.1 corrects no momentum of Keras 2.11 and later: it looks for a variable.
    return hvd_keras.callbacks.LearningRateWarmupCallback(
        initial_lr=0.05, warmup_epochs=3, momentum_correction=False
    )


def decay() -> Any:
    return hvd_keras.callbacks.LearningRateScheduleCallback(
        initial_lr=0.05, multiplier=0.7, start_epoch=1, momentum_correction=False
    )


def in_groups() -> Any:
    model = perceptron()
    groups = [list(layer.trainable_variables) for layer in model.layers]
    return fitted(sgd(), model, groups=groups)


def with_a_local_layer() -> Any:
    model = perceptron()
    wrap = hvd.PartialDistributedGradientTape
    return stepped(model, wrap=wrap, local_layers=[model.layers[0]])


def normalised() -> Any:
    layers = [keras.layers.Dense(16), hvd.SyncBatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    for layer in (model.layers[0], model.layers[-1]):
        layer.set_weights(begun(w.shape for w in layer.get_weights()))
    return stepped(model)


def convolved() -> Any:
    """As most scripts have it: no number has more than 32 bits."""
    single: dict[str, Any] = {"dtype": "float32"}
    layers = [
        keras.layers.Reshape((INPUTS, 1), **single),
        keras.layers.Conv1D(16, 3, activation="relu", **single),
        keras.layers.Flatten(**single),
        keras.layers.Dense(1, **single),
    ]
    model = keras.Sequential([keras.Input((INPUTS,), **single), *layers])
    model.set_weights(begun((w.shape for w in model.get_weights()), "float32"))
    return stepped(model, dtype="float32")


def sgd(rate: float = 0.05) -> Any:
    return keras.optimizers.SGD(rate, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def rmsprop() -> Any:
    return keras.optimizers.RMSprop(0.005)


def momentum_1() -> Any:
    return v1.train.MomentumOptimizer(0.05, 0.9)


def adam_1() -> Any:
    return v1.train.AdamOptimizer(0.01)


FP16 = hvd.Compression.fp16
# Those with Adasum run on a power of two of ranks. None is with DistributedOptimizer in a session:
# that of Horovod 0.28.1 combines nothing there, on TensorFlow 2.15.
CASES: dict[str, Callable[[], tuple[list[Any], list[Any]]]] = {
    "fit, SGD with momentum": lambda: fitted(sgd()),
    "fit, Adam": lambda: fitted(adam()),
    "fit, RMSprop": lambda: fitted(rmsprop()),
    "fit, embedding": lambda: fitted(sgd(), with_words()),
    "fit, embedding, Adam": lambda: fitted(adam(), with_words()),
    "fit, embedding, sparse_as_dense": lambda: fitted(sgd(), with_words(), sparse_as_dense=True),
    "fit, op=Sum": lambda: fitted(sgd(0.02), op=hvd.Sum),
    "fit, two passes a step": lambda: fitted(sgd(), backward_passes_per_step=2),
    "fit, two passes a step, averaged, Adam": lambda: fitted(
        adam(), backward_passes_per_step=2, average_aggregated_gradients=True
    ),
    "fit, num_groups=2": lambda: fitted(sgd(), num_groups=2),
    "fit, groups of variables": in_groups,
    "fit, gradient_predivide_factor=2": lambda: fitted(sgd(), gradient_predivide_factor=2.0),
    "fit, warm-up of the learning rate": lambda: fitted(sgd(), callbacks=[warmup()]),
    "fit, decay of the learning rate": lambda: fitted(sgd(), callbacks=[decay()]),
    "fit, fp16": lambda: fitted(sgd(), compression=FP16),
    "tape, tf.function": stepped,
    "tape, eager": lambda: stepped(compiled=False),
    "tape, op=Sum": lambda: stepped(op=hvd.Sum),
    "tape, op=Adasum": lambda: stepped(op=hvd.Adasum),
    "tape, embedding": lambda: stepped(with_words()),
    "tape, embedding, eager": lambda: stepped(with_words(), compiled=False),
    "tape, embedding, sparse_as_dense": lambda: stepped(with_words(), sparse_as_dense=True),
    "tape, num_groups=2": lambda: stepped(num_groups=2),
    "tape, gradient_predivide_factor=2": lambda: stepped(gradient_predivide_factor=2.0),
    "tape, a local layer": with_a_local_layer,
    "tape, SyncBatchNormalization": normalised,
    "tape, fp16": lambda: stepped(compression=FP16),
    "session, momentum": lambda: session(momentum_1()),
    "session, Adam, without the hook": lambda: session(adam_1(), hook=False),
    "session, op=Sum": lambda: session(momentum_1(), op=hvd.Sum),
    "session, embedding": lambda: session(v1.train.AdagradOptimizer(0.05), sparse=True),
    "session, embedding, sparse_as_dense": lambda: session(
        adam_1(), sparse=True, sparse_as_dense=True
    ),
    "session, two passes a step": lambda: session(adam_1(), backward_passes_per_step=2),
    "session, fp16": lambda: session(adam_1(), compression=FP16),
    "tape, convolution, all in float32": convolved,
}


def main() -> None:
    folder, *named = sys.argv[1:]
    tf.config.threading.set_intra_op_parallelism_threads(1)  # sums in one order
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    keras.backend.set_floatx("float64")
    for name in named or CASES:
        if "Adasum" in name and hvd.size() & (hvd.size() - 1):
            continue
        begin, end = CASES[name]()
        arrays = {f"begin{i}": one for i, one in enumerate(begin)}
        arrays |= {f"end{i}": one for i, one in enumerate(end)}
        np.savez(Path(folder, f"{name}-{hvd.rank()}.npz"), **arrays)


if __name__ == "__main__":
    main()

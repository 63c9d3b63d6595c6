"""Keras: optimizer, callbacks, saving."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path

import ddl
import ddl.keras
import keras
import numpy as np
import tensorflow as tf
from speech import RANK, SIZE
from threads import in_threads

from checks import assert_same_everywhere, check, mismatch, my_part, whole_batch


def keras_model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential(layers)


@check
def keras_parts_of_a_batch_train_as_the_whole() -> None:
    x, y = whole_batch()
    together, alone = keras_model(1), keras_model(1)
    together.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    alone.compile(keras.optimizers.SGD(0.5), "mse")
    for eagerly in (False, True):
        together.run_eagerly = alone.run_eagerly = eagerly
        together.make_train_function(force=True)
        alone.make_train_function(force=True)
        together.train_on_batch(my_part(x), my_part(y))
        alone.train_on_batch(x, y)
        for mine, want in zip(together.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, want, rtol=0, atol=1e-6)


@check
def keras_fit_ends_with_equal_weights_and_reports() -> None:
    model = keras_model(RANK + 1)
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", metrics=["mae"])
    generator = np.random.RandomState(RANK)
    x, y = generator.randn(40, 5), generator.randn(40, 3)
    progress = Path(os.environ["DDL_PROGRESS"])
    before = progress.read_text().count('"keras"') if RANK == 0 else 0
    callbacks = [
        ddl.keras.BroadcastCallback(),
        ddl.keras.MetricAverageCallback(),
        ddl.keras.ProgressCallback(every=0.0, batch_size=8),
    ]
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert_same_everywhere(model.get_weights())
    assert_same_everywhere([np.asarray(v) for v in optimizer.variables])
    assert_same_everywhere([np.array(history.history[name]) for name in ("loss", "mae")])
    if RANK == 0:
        lines = [json.loads(line) for line in progress.read_text().splitlines()]
        mine = [line for line in lines if line["source"] == "keras"][before:]
        assert [line["step"] for line in mine] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
        assert {line["steps"] for line in mine} == {10}
        assert [line["epoch"] for line in mine] == [1] * 6 + [2] * 6
        assert all(line["loss"] > 0 and line["mae"] > 0 for line in mine)
        assert mine[0]["examples_per_s"] > 0


@check
def keras_custom_loop_ends_with_equal_weights() -> None:
    model = keras_model(RANK + 3)
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    ddl.keras.broadcast_variables(model.weights)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        optimizer.apply_gradients(
            zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
                strict=True,
            )
        )

    for i in range(4):
        step(tf.constant(np.random.RandomState(10 * i + RANK).randn(4, 5), tf.float32))
    assert_same_everywhere(model.get_weights())


@check
def keras_saved_model_is_free_of_ddl() -> None:
    model = keras_model(4)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.train_on_batch(np.ones((2, 5)), np.ones((2, 3)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert type(model.optimizer) is keras.optimizers.Adam
    assert int(loaded.optimizer.iterations) == 1
    assert "ddl" not in json.dumps(loaded.get_compile_config())
    loaded.train_on_batch(np.ones((2, 5)), np.ones((2, 3)))  # alone: no other rank is asked


@check
def keras_wraps_once_and_turns_xla_off() -> None:
    import warnings

    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam())
    try:
        ddl.keras.DistributedOptimizer(optimizer)
    except ValueError as error:
        assert "distributed already" in str(error)
    else:
        raise AssertionError("wrapped twice")
    model = keras_model(6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(optimizer, "mse", jit_compile=True)
    assert any("XLA cannot compile" in str(w.message) for w in caught), caught
    assert model.jit_compile is False
    free = keras_model(6)
    free.compile(keras.optimizers.Adam(), "mse", jit_compile=True)
    assert free.jit_compile is True


@check
def keras_loss_scaling_reduces_before_it_decides() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras_model(8)
        model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    overflow = np.full((2, 5), np.inf if RANK == 0 else 1.0, "float32")
    model.train_on_batch(overflow, np.ones((2, 3)))
    model.train_on_batch(np.ones((2, 5)) * (RANK + 1), np.ones((2, 3)))
    assert_same_everywhere(model.get_weights())
    assert all(np.isfinite(w).all() for w in model.get_weights())


@check
def keras_loss_scaling_around_the_optimizer_skips_on_all_ranks_together() -> None:
    model = keras_model(8)
    inner = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
    optimizer = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)
    variables = model.trainable_variables

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(tf.square(model(x) - 1.0)))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    scales = []
    for run in (tf.function(step), step):
        for number in range(4):
            x = np.full((2, 5), RANK + 1.0 + number, "float32")
            if number == 1 and RANK == SIZE - 1:
                x[:] = np.inf
            run(tf.constant(x))
            scales.append(float(optimizer.dynamic_scale))
    first = 2.0**15
    assert scales[:3] == [first, first / 2, first / 2], scales
    assert int(inner.iterations) == 6
    assert_same_everywhere([*model.get_weights(), np.array(scales)])
    assert_same_everywhere([np.asarray(v) for v in optimizer.variables])
    assert all(np.isfinite(w).all() for w in model.get_weights())


def one_step(optimizer: keras.optimizers.Optimizer) -> np.ndarray:
    """A variable of zeros after a step of gradient descent by 1 against gradients of rank + 1."""
    variable = keras.Variable(np.zeros(2), dtype="float32")
    optimizer.apply_gradients([(tf.fill([2], RANK + 1.0), variable)])
    return variable.numpy()


@check
def keras_copies_of_an_optimizer_average() -> None:
    import copy

    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    copied = copy.deepcopy(optimizer)
    made = keras.optimizers.SGD.from_config(optimizer.get_config())
    again = copy.deepcopy(copied)
    for each in (optimizer, copied, made, again):
        assert type(each) is keras.optimizers.SGD
        assert one_step(each).tolist() == [-(SIZE + 1) / 2] * 2
    saved = json.loads(json.dumps(keras.optimizers.serialize(optimizer)))
    assert one_step(keras.optimizers.deserialize(saved)).tolist() == [-(RANK + 1)] * 2


@check
def keras_fit_without_a_distributed_optimizer_is_refused() -> None:
    model = keras_model(4)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    fit = {"x": np.ones((2, 5)), "y": np.ones((2, 3)), "verbose": 0}
    fit["callbacks"] = [ddl.keras.BroadcastCallback()]
    if SIZE > 1:
        try:
            loaded.fit(**fit)
        except RuntimeError as error:
            assert "does not average" in str(error), error
            assert "compile(ddl.keras.DistributedOptimizer(model.optimizer)" in str(error), error
        else:
            raise AssertionError("no error")
    loaded.compile(ddl.keras.DistributedOptimizer(loaded.optimizer), "mse")
    loaded.fit(**fit)
    scaled = keras.optimizers.LossScaleOptimizer(
        ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    )
    loaded.compile(scaled, "mse")
    loaded.fit(**fit)


@check
def keras_accumulated_gradients_are_reduced_once_for_each_update() -> None:
    from tensorflow.python.framework import op_callbacks

    reductions = []

    def note(op_type: bytes, *_: object, **__: object) -> None:
        if "AllReduce" in str(op_type):
            reductions.append(op_type)

    x, y = whole_batch()
    batches = [(x * scale, y) for scale in (1.0, 2.0, -1.0, 0.5)]

    def sgd(**more: int) -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.3, **more)

    for way in ("Keras's", "ours"):
        for eagerly in (True, False):
            together, alone = keras_model(1), keras_model(1)
            optimizer = (
                ddl.keras.DistributedOptimizer(sgd(gradient_accumulation_steps=2))
                if way == "Keras's"
                else ddl.keras.DistributedOptimizer(sgd(), backward_passes_per_step=2)
            )
            together.compile(optimizer, "mse", run_eagerly=eagerly)
            alone.compile(sgd(gradient_accumulation_steps=2), "mse", run_eagerly=eagerly)
            reductions.clear()
            op_callbacks.add_op_callback(note)
            try:
                for inputs, targets in batches:
                    together.train_on_batch(my_part(inputs), my_part(targets))
                    alone.train_on_batch(inputs, targets)
            finally:
                op_callbacks.remove_op_callback(note)
            if eagerly:
                assert len(reductions) == 2, reductions
            assert int(optimizer.iterations) == 2
            for mine, want in zip(together.get_weights(), alone.get_weights(), strict=True):
                np.testing.assert_allclose(mine, want, rtol=0, atol=1e-6)
    for wrong in (0, -1):
        try:
            ddl.keras.DistributedOptimizer(sgd(), backward_passes_per_step=wrong)
        except ValueError as error:
            assert "Pass 1 or more" in str(error)
        else:
            raise AssertionError("no error")


@check
def keras_accumulation_with_loss_scaling_skips_together() -> None:
    model = keras_model(3)
    inner = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    for number in range(5):
        x = np.full((2, 5), np.inf if number == 2 and RANK == 0 else RANK + 1.0, "float32")
        model.train_on_batch(x, np.ones((2, 3)))
    assert int(inner.iterations) == 2
    assert_same_everywhere(model.get_weights())


def slope_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    """One weight, whose gradient is the mean of the inputs."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(optimizer, lambda _, outputs: outputs)
    return model


@check
def keras_epochs_of_different_lengths_are_errors_on_all_ranks() -> None:
    if SIZE == 1:
        return
    for steps in (4, 5):
        model = slope_model(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        x = np.ones((5 if RANK else 4, 1), "float32")
        data = tf.data.Dataset.from_tensor_slices((x, x)).batch(1).take(steps)
        fit = {"epochs": 2, "verbose": 0, "callbacks": [ddl.keras.BroadcastCallback()]}
        if steps == 4:
            model.fit(data, **fit)
            continue
        message = mismatch(lambda: model.fit(data, **fit))  # noqa: B023
        assert "the end of epoch 1 after 4 steps" in message, message
        assert "dataset.take()" in message and "ddl.keras.JoinCallback" in message, message
    assert_same_everywhere([np.ones(2)])


@check
def keras_ranks_with_more_batches_go_on_without_the_others() -> None:
    rate, momentum = 0.1, 0.5
    model = slope_model(
        ddl.keras.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=momentum))
    )
    # Rank 0 has most in the first epoch, and the last rank in the second.
    batches = [[2 + SIZE - rank for rank in range(SIZE)], [2 + 3 * rank for rank in range(SIZE)]]
    weight, velocity = float(model.get_weights()[0][0, 0]) if RANK == 0 else 0.0, 0.0
    weight = float(ddl.bcast(tf.constant(weight)))
    for counts in batches:
        x = np.full((counts[RANK], 1), RANK + 1.0, "float32")
        model.fit(x, x, batch_size=1, verbose=0, callbacks=[ddl.keras.JoinCallback()])
        for step in range(max(counts)):
            present = [rank + 1.0 for rank in range(SIZE) if counts[rank] > step]
            velocity = momentum * velocity - rate * sum(present) / len(present)
            weight += velocity
        np.testing.assert_allclose(model.get_weights()[0], [[weight]], rtol=1e-4)
        assert_same_everywhere([np.asarray(v) for v in model.optimizer.variables])


@check
def keras_models_in_threads_of_their_own_train_right() -> None:
    x, y = whole_batch()
    factors = {"first": 1.0, "second": -2.0, "third": 0.5, "fourth": 3.0}
    eagerly = ("third", "fourth")
    fit = {"epochs": 6, "batch_size": len(x), "shuffle": False, "verbose": 0}

    def train(model: keras.Model, factor: float) -> list[np.ndarray]:
        callbacks = [ddl.keras.BroadcastCallback(), ddl.keras.MetricAverageCallback()]
        history = model.fit(my_part(x) * factor, my_part(y), callbacks=callbacks, **fit)
        return [*model.get_weights(), np.array(history.history["loss"])]

    trainings, wanted = [], []
    for name, factor in factors.items():
        model, alone = keras_model(5), keras_model(5)
        optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", run_eagerly=name in eagerly)
        alone.compile(keras.optimizers.SGD(0.1), "mse")
        history = alone.fit(x * factor, y, **fit)
        wanted.append([*alone.get_weights(), np.array(history.history["loss"])])
        trainings.append(functools.partial(train, model, factor))
    found = in_threads(*trainings, names=list(factors), apart_s=0.1)
    for got, want in zip(found, wanted, strict=True):
        assert isinstance(got, list), got
        for mine, right in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-5)


@check
def keras_models_that_were_tried_before_are_not_mixed_in_threads() -> None:
    if SIZE == 1:
        return
    x, y = whole_batch()

    def model_that_was_tried() -> keras.Model:
        model = keras_model(5)
        model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        train(model)  # traced here, its step belongs to the main thread
        return model

    def train(model: keras.Model) -> None:
        model.fit(my_part(x), my_part(y), batch_size=len(x), shuffle=False, verbose=0)

    trainings = [functools.partial(train, model_that_was_tried()) for _ in range(2)]
    # Their tensors have the same shapes, and they are at the same step.
    for failed in in_threads(*trainings, names=["first", "second"], apart_s=0.5):
        assert isinstance(failed, tf.errors.InvalidArgumentError), failed
        assert "ddl_gradients_of_optimizer_" in failed.message, failed


@check
def keras_models_that_differ_are_named() -> None:
    if SIZE == 1:
        return
    variable = keras.Variable(np.zeros(2 + RANK), dtype="float32", name="kernel")
    message = mismatch(lambda: ddl.keras.broadcast_variables([variable]))
    assert "kernel" in message, message
    assert "rank 1 sent float32[3] as tensor 0, rank 0 float32[2]." in message, message

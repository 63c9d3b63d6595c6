"""Keras: optimizer, callbacks, saving."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ddl
import ddl.keras
import keras
import numpy as np
import tensorflow as tf
from ddl_ops import arrays, checkpoints, mid_epoch, preemption
from ddl_ops.equal_settings import SettingsDifferError
from ddl_ops.equal_weights import ModelsDifferError, WeightsDifferError
from speech import RANK, SIZE, SLOWNESS
from tensorflow.python.eager.polymorphic_function import polymorphic_function
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
def keras_metrics_of_several_values_are_averaged() -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="softmax")])
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    metric = keras.metrics.F1Score(average=None)
    model.compile(optimizer, "categorical_crossentropy", metrics=[metric])
    generator = np.random.RandomState(RANK)
    mine = []
    history = model.fit(
        *(generator.randn(16, 5), np.eye(3)[generator.randint(3, size=16)]),
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: mine.append(dict(logs))
            ),
            ddl.keras.BroadcastCallback(),
            ddl.keras.MetricAverageCallback(),
            ddl.keras.ProgressCallback(every=0.0),
        ],
    ).history
    for name in ("loss", "f1_score"):
        (total,) = ddl.allreduce_n([tf.constant(mine[0][name], tf.float64)], average=False)
        np.testing.assert_allclose(history[name][0], total / SIZE)
    assert type(history["loss"][0]) is float and np.shape(history["f1_score"][0]) == (3,)
    if RANK == 0:
        lines = map(json.loads, Path(os.environ["DDL_PROGRESS"]).read_text().splitlines())
        *_, last = (line for line in lines if line["source"] == "keras")
        assert last["loss"] == history["loss"][0] and "f1_score" not in last, last


@check
def keras_texts_among_the_metrics_are_left_as_they_are() -> None:
    model = keras_model(1)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    more = {"phase": "warm-up", "nothing": None, "number": np.float32(0.5), "tensor": tf.ones([])}
    adds = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(more))
    averages = ddl.keras.MetricAverageCallback()
    tells = ddl.keras.ProgressCallback(every=0.0)
    callbacks = [ddl.keras.BroadcastCallback(), adds, averages, tells]
    model.fit(*map(my_part, whole_batch()), verbose=0, callbacks=callbacks)
    if RANK == 0:
        lines = map(json.loads, Path(os.environ["DDL_PROGRESS"]).read_text().splitlines())
        *_, last = (line for line in lines if line["source"] == "keras")
        assert last["number"] == 0.5 and last["tensor"] == 1.0, last
        assert "phase" not in last and "nothing" not in last, last


@check
def keras_ranks_without_a_batch_have_the_metrics_of_the_others() -> None:
    """Also one that has had some in the epoch before, and knows its metrics, which are zeros."""
    generator = np.random.RandomState(RANK)
    x, y = generator.randn(3, 5).astype("float32"), generator.randn(3, 3)
    for without in range(SIZE):
        model = keras_model(RANK + 1)
        optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model.compile(optimizer, "mse", metrics=["mae"])
        # In each epoch, so many batches. At least one rank always has some.
        counts = [0, 0] if without == RANK and SIZE > 1 else [3, 3]
        if SIZE == 3 and (without + 1) % SIZE == RANK:
            counts = [3, 0]
        coming = iter(counts)

        def batches(coming: Iterator[int] = coming) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            yield from ((x[n : n + 1], y[n : n + 1]) for n in range(next(coming)))

        like = [tf.TensorSpec((1, 5), tf.float32), tf.TensorSpec((1, 3), tf.float64)]
        mine: list[dict[str, float]] = []
        noted = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs, mine=mine: mine.append(dict(logs))
        )
        history = model.fit(
            tf.data.Dataset.from_generator(batches, output_signature=tuple(like)),
            epochs=2,
            verbose=0,
            validation_data=(x, y),
            callbacks=[noted, ddl.keras.JoinCallback(), ddl.keras.MetricAverageCallback()],
        ).history
        for epoch, (before, count) in enumerate(zip(mine, counts, strict=True)):
            known = [before.get(name, 0.0) * (count > 0) for name in ("loss", "mae")]
            sums = [*known, before["val_loss"], count > 0]
            (totals,) = ddl.allreduce_n([tf.cast(tf.stack(sums), tf.float64)], average=False)
            wanted = [totals[0] / totals[3], totals[1] / totals[3], totals[2] / SIZE]
            found = [history[name][epoch] for name in ("loss", "mae", "val_loss")]
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


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
def keras_broadcasts_weights_of_any_name() -> None:
    odd = [
        keras.Variable(float(RANK), name="scale (log) α"),
        tf.Variable(RANK + 1.0, name="gate[0]"),
        tf.Variable(RANK + 2.0, name="gate(0)"),
    ]
    ddl.keras.broadcast_variables(odd)
    assert [float(one) for one in odd] == [0, 1, 2]


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
def keras_steps_that_average_by_themselves_are_without_xla_by_default() -> None:
    from keras.src.trainers import trainer

    class Averages(keras.Model):
        def train_step(self, batch):
            x, y = batch
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            gradients = tape.gradient(loss, self.trainable_variables)
            pairs = ddl.grads_reduce(zip(gradients, self.trainable_variables, strict=True))
            self.optimizer.apply_gradients(pairs)
            return {"loss": loss}

    x, y = (my_part(one) for one in whole_batch())
    resolve = trainer.Trainer._resolve_auto_jit_compile
    # As it is on a host with a GPU.
    trainer.Trainer._resolve_auto_jit_compile = trainer.model_supports_jit
    try:
        inputs = keras.Input((5,))
        model = Averages(inputs, keras.layers.Dense(3, kernel_initializer="ones")(inputs))
        for options in ({}, {"jit_compile": "auto"}):
            model.compile(keras.optimizers.SGD(0.1), **options)
            model.fit(x, y, verbose=0)
    finally:
        trainer.Trainer._resolve_auto_jit_compile = resolve
    assert_same_everywhere(model.get_weights())
    # Else a model that is saved and loaded is compiled by XLA.
    assert model.get_compile_config()["jit_compile"] is False


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

    alone = keras_model(1)
    alone.compile(sgd(gradient_accumulation_steps=2), "mse", run_eagerly=True)
    if RANK == 0:
        sgd()  # as of a model to compare with: those below have other names here
    for inputs, targets in batches:
        alone.train_on_batch(inputs, targets)
    for way in ("Keras's", "ours"):
        for eagerly in (True, False):
            together = keras_model(1)
            optimizer = (
                ddl.keras.DistributedOptimizer(sgd(gradient_accumulation_steps=2))
                if way == "Keras's"
                else ddl.keras.DistributedOptimizer(sgd(), backward_passes_per_step=2)
            )
            together.compile(optimizer, "mse", run_eagerly=eagerly)
            reductions.clear()
            op_callbacks.add_op_callback(note)
            try:
                for inputs, targets in batches:
                    together.train_on_batch(my_part(inputs), my_part(targets))
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
def keras_gradients_that_wait_at_the_end_of_a_fit_stay_each_ranks() -> None:
    for callback in (ddl.keras.BroadcastCallback, ddl.keras.JoinCallback):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = ddl.keras.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=2
        )
        # The gradient is the mean of the batch.
        model.compile(optimizer, loss=lambda _, predicted: keras.ops.mean(predicted))
        x = np.full((3, 1), 2.0 * RANK, "float32")
        for _ in range(2):  # 2 x 3 steps are 3 updates
            model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[callback()])
        np.testing.assert_allclose(model.get_weights()[0], [[-3.0 * (SIZE - 1)]], rtol=1e-6)


@check
def keras_several_optimizers_in_one_accumulate_each_by_itself() -> None:
    def several(**more: int) -> keras.optimizers.Optimizer:
        first, other = keras.optimizers.SGD(0.5, **more), keras.optimizers.Adam(0.01, **more)
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(first, {".*bias": other})
        )

    try:
        ddl.keras.DistributedOptimizer(several(), backward_passes_per_step=2)
    except ValueError as error:
        assert "Give each optimizer within it gradient_accumulation_steps=2" in str(error), error
    else:
        raise AssertionError("no error")
    x, y = whole_batch()
    together, alone = keras_model(1), keras_model(1)
    optimizer = ddl.keras.DistributedOptimizer(several(gradient_accumulation_steps=2))
    together.compile(optimizer, "mse")
    alone.compile(several(gradient_accumulation_steps=2), "mse")
    for scale in (1.0, 2.0, -1.0, 0.5):
        together.train_on_batch(my_part(x * scale), my_part(y))
        alone.train_on_batch(x * scale, y)
    for mine, want in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, want, rtol=0, atol=1e-6)


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


@check(least=2)
def keras_epochs_of_different_lengths_are_errors_on_all_ranks() -> None:
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


@check(least=2)
def keras_ranks_that_stop_by_themselves_are_named() -> None:
    model = slope_model(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x = np.ones((5, 1), "float32")
    if RANK == 1:
        x[2] = np.nan
    callbacks = [ddl.keras.BroadcastCallback(), keras.callbacks.TerminateOnNaN()]
    fit = {"batch_size": 1, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    message = mismatch(lambda: model.fit(x, x, **fit))
    assert "the end of epoch 1 after 3 steps" in message, message
    assert "Rank 1 has stopped in the middle of the epoch" in message, message
    assert "TerminateOnNaN" in message and "number of steps" not in message, message


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
def keras_ranks_that_join_validate_the_weights_that_all_go_on_with() -> None:
    model = slope_model(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    x, one = np.full((2 + 2 * RANK, 1), RANK + 1.0, "float32"), np.ones((1, 1), "float32")
    joins, weights = ddl.keras.JoinCallback(), []
    noted = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: weights.append((float(model.get_weights()[0][0, 0]), logs))
    )
    fit = {"batch_size": 1, "epochs": 4, "verbose": 0, "callbacks": [joins, noted]}
    model.fit(x, x, validation_data=(one, one), validation_freq=2, **fit)
    # An evaluate() of one rank's own is no end of an epoch, nor is one within an epoch.
    within = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: model.evaluate(one, one, verbose=0, callbacks=joins)
    )
    if RANK == 0:
        model.evaluate(one, one, verbose=0, callbacks=[joins])
    fit["callbacks"].append(within)
    model.fit(x, x, validation_data=(one, one), **fit)
    assert_same_everywhere([np.array([weight for weight, _ in weights])])
    # Where some callback evaluates within the epoch, ranks join at its end.
    for epoch, (weight, logs) in enumerate(weights[:4]):
        assert ("val_loss" in logs) == (epoch % 2 == 1), (epoch, logs)
        np.testing.assert_allclose(logs.get("val_loss", weight), weight, rtol=1e-6)


@check
def keras_ranks_join_before_any_callback_looks_at_the_weights() -> None:
    """Without validation, too, and wherever JoinCallback is placed."""
    x = np.full((2 + 2 * RANK, 1), RANK + 1.0, "float32")
    most = 2 + 2 * (SIZE - 1)
    seen: list[int] = []
    noted = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(int(model.optimizer.iterations))
    )
    model = slope_model(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    fit = {"batch_size": 1, "epochs": 2, "verbose": 0}
    model.fit(x, x, callbacks=[noted, ddl.keras.JoinCallback()], **fit)
    given = keras.callbacks.CallbackList([noted, ddl.keras.JoinCallback()], model=model)
    model.fit(x, x, callbacks=given, **fit)
    assert seen == [most, 2 * most, 3 * most, 4 * most], seen


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


@check(least=2)
def keras_models_that_were_tried_before_are_not_mixed_in_threads() -> None:
    x, y = whole_batch()

    def model_that_was_tried() -> keras.Model:
        model = keras_model(5)
        model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        train(model)  # traced here, its step belongs to the main thread
        return model

    def train(model: keras.Model, after_s: float = 0.0) -> None:
        late = keras.callbacks.LambdaCallback(on_train_begin=lambda _: time.sleep(after_s))
        fit = {"batch_size": len(x), "shuffle": False, "verbose": 0, "callbacks": [late]}
        model.fit(my_part(x), my_part(y), **fit)

    trainings = [
        functools.partial(train, model_that_was_tried(), 3 * SLOWNESS * ((number + RANK) % 2))
        for number in range(2)
    ]
    # Their tensors have the same shapes, and they are at the same step.
    for failed in in_threads(*trainings, names=["first", "second"]):
        assert isinstance(failed, tf.errors.InvalidArgumentError), failed
        assert "ddl_gradients_of_optimizer_" in failed.message, failed


@check(least=2)
def keras_models_that_differ_are_named() -> None:
    variable = keras.Variable(np.zeros(2 + RANK), dtype="float32", name="kernel")
    message = mismatch(lambda: ddl.keras.broadcast_variables([variable]))
    assert "kernel" in message, message
    assert "rank 1 sent float32[3] as tensor 0, rank 0 float32[2]." in message, message


@check(least=2)
def keras_models_of_other_automatic_names_train_together() -> None:
    """Where one rank alone has made a model before, Keras numbers its layers otherwise."""
    arrays._joins.clear()  # of other checks
    if RANK == 0:
        keras_model(1)
    x, y = whole_batch()
    for callbacks in ([], [ddl.keras.BroadcastCallback()]):
        model = keras_model(RANK + 1)
        optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.1))
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        model.fit(my_part(x), my_part(y), epochs=2, verbose=0, callbacks=callbacks)
        assert_same_everywhere(model.get_weights())
    wide = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2 + RANK)])
    message = mismatch(lambda: ddl.keras.broadcast_variables(wide.weights))
    assert f'"ddl_bcast/{wide.weights[0].path}": rank 1 sent float32[5,3]' in message, message


@check(least=2)
def keras_layers_that_the_script_names_are_not_taken_for_each_other() -> None:
    names = ["tower_1", "tower_2"] if RANK == 0 else ["tower_2", "tower_1"]
    towers = [keras.layers.Dense(1, use_bias=False, name=name) for name in names]
    for tower in towers:
        tower.build([None, 1])
    kernels = [tower.kernel for tower in towers]
    message = mismatch(lambda: ddl.keras.broadcast_variables(kernels))
    assert "tower_1" in message and "tower_2" in message, message


def fitted(layer: keras.Layer, x: tf.Tensor, dtype: str, *, seen: bool = False) -> keras.Model:
    model = keras.Sequential([keras.Input(x.shape[1:], dtype=dtype), layer, keras.layers.Dense(1)])
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    if seen:
        model.predict(x, verbose=0)
        model.fit(x, tf.ones([len(x), 1]), verbose=0)
    callbacks = [ddl.keras.BroadcastCallback()]
    model.fit(x, tf.ones([len(x), 1]), verbose=0, callbacks=callbacks)
    return model


@check
def keras_synchronized_batch_normalization_is_that_of_all_ranks() -> None:
    keras.utils.clear_session()  # the gradients of the moments are known by the layers' names
    x, y = (part.astype("float32") for part in whole_batch())
    models = []
    for optimizer in (
        ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        keras.optimizers.SGD(0.1),
    ):
        keras.utils.set_random_seed(3)
        normalization = keras.layers.BatchNormalization(synchronized=True, momentum=0.5)
        model = keras.Sequential([keras.Input((5,)), normalization, keras.layers.Dense(3)])
        model.compile(optimizer, "mse")
        models.append(model)
    together, alone = models
    for _ in range(3):
        together.train_on_batch(my_part(x), my_part(y))
    alone.layers[0].synchronized = False
    for _ in range(3):
        alone.train_on_batch(x, y)
    for mine, want in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, want, rtol=0, atol=1e-5)
    own = keras.layers.BatchNormalization(momentum=0.0)
    own(my_part(x), training=True)
    np.testing.assert_allclose(own.moving_mean, my_part(x).mean(0), atol=1e-6)


@check
def keras_layers_that_each_rank_adapts_compute_alike() -> None:
    """Also in functions that were traced before."""
    x = tf.reshape(tf.range(12.0), [4, 3])
    for seen in (False, True):
        layer = keras.layers.Normalization()
        layer.adapt(x * (1.0 + RANK))
        model = fitted(layer, x, "float32", seen=seen)
        assert_same_everywhere([np.array(model.history.history["loss"])])
        assert_same_everywhere([model.predict(x, verbose=0), np.asarray(layer(x))])
        traced = model.train_function
        model.fit(x, tf.ones([4, 1]), verbose=0, callbacks=[ddl.keras.BroadcastCallback()])
        assert model.train_function is traced


@check(least=2)
def keras_vocabularies_that_differ_are_errors_on_all_ranks() -> None:
    words = tf.constant([["a b"], ["b c d"]])
    whole = tf.constant([[0], [1], [2], [3]], tf.int64)
    numbers = tf.cast(whole, tf.float32)

    def text(seen: list[str]) -> keras.Layer:
        layer = keras.layers.TextVectorization(max_tokens=4, output_mode="tf_idf", name="words")
        layer.adapt(seen)
        return layer

    def bins(seen: tf.Tensor) -> keras.Layer:
        layer = keras.layers.Discretization(num_bins=3, output_mode="one_hot", name="bins")
        layer.adapt(seen)
        return layer

    mine = ["a a b b b c"] if RANK == 0 else ["c c c a a b"]
    weighed = ["a b", "b"] if RANK == 0 else ["a b", "a b", "b", "b a"]  # one vocabulary
    for layer, x, dtype in (
        (text(mine), words, "string"),
        (text(weighed), words, "string"),
        (bins(numbers + RANK), numbers, "float32"),
    ):
        try:
            fitted(layer, x, dtype)
        except ModelsDifferError as error:
            assert repr(layer.name) in str(error), error
        else:
            raise AssertionError(layer.name)
    if SIZE > 1:  # where one rank alone has such a layer
        other = keras.layers.CategoryEncoding(3, output_mode="one_hot")
        try:
            fitted(bins(numbers) if RANK == 0 else other, numbers, "float32")
        except ModelsDifferError as error:
            assert "layers with vocabularies" in str(error), error
        else:
            raise AssertionError("layers of two kinds")
    fitted(text(["a b c"]), words, "string")
    fitted(keras.layers.IntegerLookup(vocabulary=[3, 5], output_mode="one_hot"), whole, "int64")
    fitted(bins(numbers), numbers, "float32")


@check
def keras_broadcasts_of_each_epoch_trace_no_function() -> None:
    """TensorFlow warns of those that do, and they take seconds for many weights."""
    variable = keras.Variable(np.full(2, RANK, "float32"))
    functions = polymorphic_function._tf_function_counter.get_cell("0")
    before = functions.value()
    ddl.keras.broadcast_variables([variable])
    assert functions.value() == before
    np.testing.assert_array_equal(variable, np.zeros(2))


class _Sets(keras.callbacks.Callback):
    """Lets rank 1 scale its first trained weights at the end of the first epoch."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if RANK == 1 and epoch == 0:
            kernel = self.model.trainable_variables[0]
            kernel.assign(kernel * self._factor)


def _apart_after(factor: float, epochs: int = 2) -> str:
    model = keras_model(1)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x, y = whole_batch()
    callbacks = [ddl.keras.BroadcastCallback(), _Sets(factor)]
    try:
        model.fit(my_part(x), my_part(y), epochs=epochs, verbose=0, callbacks=callbacks)
    except WeightsDifferError as error:
        return str(error)
    return ""


@check
def keras_weights_that_end_apart_are_an_error_on_every_rank() -> None:
    said = _apart_after(1.01)
    if SIZE == 1:
        assert said == ""
    else:
        assert "rank 1 has other values than rank 0 of 'sequential" in said, said
        assert "/dense" in said and "/kernel' and" not in said, said
        assert "EarlyStopping(restore_best_weights=True)" in said
    assert _apart_after(1 + 1e-6) == ""  # as on another processor
    assert (_apart_after(float("nan"), epochs=1) == "") == (SIZE == 1)


@check
def keras_weights_that_are_restored_at_the_end_are_compared() -> None:
    """What EarlyStopping restores after the other callbacks, by a loss of the rank's own."""
    losses = iter([2.0, 1.0, 3.0] if RANK else [1.0, 2.0, 3.0])
    own = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: logs.update(val_loss=next(losses))
    )
    best = keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
    model = keras_model(1)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = map(my_part, whole_batch())
    said = ""
    try:  # nested, as Keras takes them
        model.fit(x, y, epochs=3, verbose=0, callbacks=[[ddl.keras.BroadcastCallback()], own, best])
    except WeightsDifferError as error:
        said = str(error)
    assert ("EarlyStopping(restore_best_weights=True)" in said) == (SIZE > 1), said
    # And in a loop of the script's own, which tells the callbacks.
    several = keras.callbacks.CallbackList([ddl.keras.BroadcastCallback()], model=model)
    several.on_train_begin()
    model.layers[-1].kernel.assign_add(keras.ops.full_like(model.layers[-1].kernel, RANK))
    try:
        several.on_train_end()
    except WeightsDifferError:
        assert SIZE > 1
    else:
        assert SIZE == 1


class _LossOfItsOwn(keras.callbacks.Callback):
    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self._losses = losses

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        logs["val_loss"] = self._losses[epoch]


@check
def keras_learning_rates_that_part_are_an_error_on_every_rank() -> None:
    """ReduceLROnPlateau by the val_loss of the rank's own data, and nothing compares at the end."""
    sgd, scaling = keras.optimizers.SGD, keras.optimizers.LossScaleOptimizer
    distribute = ddl.keras.DistributedOptimizer
    x, y = map(my_part, whole_batch())
    for optimizer in (
        distribute(sgd(0.1)),
        distribute(scaling(sgd(0.1))),
        scaling(distribute(sgd(0.1))),
        distribute(sgd(0.1), backward_passes_per_step=2),
        distribute(sgd(lambda: 0.1 + RANK)),  # a function of the script's own is not asked
    ):
        model = keras_model(1)
        model.compile(optimizer, "mse")
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        sets = isinstance(inner._learning_rate, keras.Variable)
        average = ddl.keras.MetricAverageCallback()
        for averages in (True, False):
            own = _LossOfItsOwn([1.0, 2.0, 3.0] if RANK else [3.0, 2.0, 1.0])
            plateau = keras.callbacks.ReduceLROnPlateau("val_loss", patience=1)
            callbacks = [own, *[average] * averages, *[plateau] * sets]
            said = ""
            try:
                model.fit(x, y, epochs=3, batch_size=2, verbose=0, callbacks=callbacks)
            except tf.errors.InvalidArgumentError as error:
                said = error.message
            rates = "rank 1 has a learning rate of 0.0001, rank 0 one of 0.001. "
            assert (rates in said) == (SIZE > 1 and sets and not averages), said
            assert not said or "put MetricAverageCallback before" in said


class _DropsByItsOwnData(keras.optimizers.schedules.LearningRateSchedule):
    """After a number of steps that each rank has worked out by itself, and tells nobody."""

    def __call__(self, step: Any) -> Any:
        return tf.where(step <= 2 + RANK, 0.1, 0.01)

    def get_config(self) -> dict[str, Any]:
        return {}


@check
def keras_learning_rates_of_loops_and_schedules_are_compared() -> None:
    schedules = keras.optimizers.schedules
    model = keras_model(1)
    x, y = map(my_part, whole_batch())

    def step(optimizer: keras.optimizers.Optimizer) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for run in (step, tf.function(step)):
        optimizer = ddl.keras.DistributedOptimizer(
            keras.optimizers.Adam(schedules.CosineDecay(0.1, 5))
        )
        for _ in range(7):
            run(optimizer)
    for run in (step, tf.function(step)):
        optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(_DropsByItsOwnData()))
        for _ in range(3):
            run(optimizer)
        if SIZE == 1:
            continue
        message = mismatch(lambda run=run, optimizer=optimizer: run(optimizer))
        assert "rank 1 has a learning rate of 0.1, rank 0 one of 0.01. " in message, message


class _Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.model.stop_training = batch == 1


@check
def keras_weights_that_end_alike_are_no_error() -> None:
    generator = np.random.RandomState(RANK)
    x, y = generator.randn(40, 5), generator.randn(40, 3)

    def best() -> keras.callbacks.Callback:
        return keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)

    average, broadcast = ddl.keras.MetricAverageCallback, ddl.keras.BroadcastCallback
    for callbacks in (
        [broadcast(), average(), best()],
        [average(), best(), broadcast()],
        [broadcast(), _Stops()],
        [ddl.keras.JoinCallback(), average(), best()],
    ):
        joins = isinstance(callbacks[0], ddl.keras.JoinCallback)
        rows = 40 - 8 * RANK if joins else 40
        layers = [keras.Input((5,)), keras.layers.Dense(7), keras.layers.BatchNormalization()]
        model = keras.Sequential([*layers, keras.layers.Dense(3)])
        optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.5))
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer), "mse")
        model.fit(
            *(x[:rows], y[:rows]),
            batch_size=8,
            epochs=4,
            verbose=0,
            callbacks=callbacks,
            validation_data=(x, y),
        )
        assert_same_everywhere([np.asarray(v) for v in model.trainable_variables])


@check
def keras_models_that_have_no_weights_before_their_first_step_start_equal() -> None:
    x, y = (part.astype("float32") for part in map(my_part, whole_batch()))
    arrays._joins.clear()  # of other checks

    def model() -> keras.Model:
        keras.utils.set_random_seed(RANK + 1)
        return keras.Sequential([keras.layers.Dense(7), keras.layers.Dense(3)])

    fitted, half, looped = model(), model(), model()
    if RANK == 0:
        half(x)
    for one in (fitted, half):
        one.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        one.fit(x, y, verbose=0)
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(looped(x) - y))
        optimizer.apply(tape.gradient(loss, looped.trainable_variables), looped.trainable_variables)

    step()
    for one in (fitted, half, looped):
        assert_same_everywhere([np.asarray(v) for v in one.trainable_variables])


@check
def keras_ranks_that_have_joined_start_a_fit_equal() -> None:
    """With the weights of the last to join: those of others are old."""
    x, y = (part.astype("float32") for part in map(my_part, whole_batch()))
    model = keras_model(RANK + 1)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    last = ddl.join() if SIZE > 1 else 0
    mine = [np.asarray(v) for v in model.trainable_variables]
    model.fit(x, y, verbose=0)
    theirs = [np.asarray(v) for v in model.trainable_variables]
    assert_same_everywhere(theirs)
    if last == RANK:
        assert all(np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True))


def _train_by_hand(model: keras.Model, optimizer: keras.Optimizer, in_a_function: bool) -> None:
    x, y = (part.astype("float32") for part in map(my_part, whole_batch()))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if in_a_function else step
    run()
    run()


@check
def keras_models_that_are_made_after_a_join_start_equal() -> None:
    if SIZE > 1:
        ddl.join()
    for in_a_function in (True, False):
        model = keras_model(RANK + 1)
        optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
        _train_by_hand(model, optimizer, in_a_function)
        assert_same_everywhere([np.asarray(v) for v in model.trainable_variables])
    # Whatever rank has joined last: what rank 0 alone has restored counts.
    bias = keras.Variable([42.0 if RANK == 0 else 0.0])
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([bias])
    optimizer.apply([tf.ones([1])], [bias])
    assert np.asarray(bias) == 41.0, np.asarray(bias)


@check
def keras_weights_that_are_set_again_start_equal_with_another_optimizer() -> None:
    """As for each fold, where each rank goes back to what it has made at first."""
    arrays._joins.clear()  # of other checks
    model = keras_model(RANK + 1)
    made = model.get_weights()
    for in_a_function in (True, False):
        for _ in range(2):
            model.set_weights(made)
            optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
            _train_by_hand(model, optimizer, in_a_function)
            assert_same_everywhere(model.get_weights())


@check(least=2)
def keras_a_rank_may_trace_alone_what_all_have_been_given() -> None:
    """As rank 0 does for TensorBoard, before anything is reduced."""
    arrays._joins.clear()  # of other checks
    for _ in range(2):
        model = keras_model(RANK + 1)
        optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build(model.trainable_variables)
        ddl.keras.broadcast_variables(model.weights + optimizer.variables)

        @tf.function
        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            gradients = [tf.ones_like(one) for one in model.trainable_variables]
            optimizer.apply(gradients, model.trainable_variables)

        if RANK == 0:
            step.get_concrete_function()
        assert float(ddl.allreduce(tf.constant(1.0))) == 1.0
        step()
        assert_same_everywhere(model.get_weights())


@check(least=2)
def keras_variables_that_are_made_after_a_join_start_equal() -> None:
    """As of the next model, in a loop of the script's own whose epochs end in a join."""
    one = tf.ones([1])
    old = tf.Variable([7.0 + RANK])
    if RANK == 0:
        ddl.grads_reduce([(one, old)])
    for in_a_function in (True, False):
        ddl.join()
        new = tf.Variable([42.0 + RANK])

        def step(new: tf.Variable = new) -> None:
            ddl.grads_reduce([(one, old), (one, new)])

        run = tf.function(step) if in_a_function else step
        run()
        run()
        assert float(new[0]) == 42.0, float(new[0])
        # A rank may have trained it while the others had no data; who lets them join gives it.
        assert float(old[0]) == 7.0 + RANK, float(old[0])


@check
def keras_states_of_optimizers_start_equal() -> None:
    """Some have a copy of the weights; and rank 0 alone may have restored one."""
    arrays._joins.clear()  # of other checks
    for in_a_function in (True, False):
        for copies in (True, False):
            model = keras_model(RANK + 1)
            kind = keras.optimizers.ScheduleFreeAdamW if copies else keras.optimizers.Adam
            optimizer = ddl.keras.DistributedOptimizer(kind(0.05))
            if copies or RANK == 0:
                optimizer.build(model.trainable_variables)
            if not copies and RANK == 0:
                for one in optimizer.variables[2:]:
                    one.assign(keras.ops.ones_like(one))
                optimizer.iterations.assign(7)
            ddl.keras.broadcast_variables(model.weights)
            _train_by_hand(model, optimizer, in_a_function)
            states = [np.asarray(v) for v in optimizer.variables]
            assert_same_everywhere([*model.get_weights(), *states])
            assert int(optimizer.iterations) == (2 if copies else 9)


@check
def keras_settings_of_optimizers_that_differ_are_named() -> None:
    arrays._joins.clear()  # of other checks
    x, y = map(my_part, whole_batch())
    sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam
    cosine = keras.optimizers.schedules.CosineDecay
    scaling = keras.optimizers.LossScaleOptimizer
    ours = ddl.keras.DistributedOptimizer
    last = RANK == SIZE - 1
    rank = f"rank {SIZE - 1}"

    class Own(keras.optimizers.SGD):
        def get_config(self) -> dict[str, Any]:
            return super().get_config() | {"seed": RANK, "part": RANK, "of": print}

    def said(optimizer: keras.optimizers.Optimizer, way: str) -> str:
        model = keras_model(1)
        model.compile(optimizer, "mse")
        try:
            if way == "loop":
                _train_by_hand(model, optimizer, True)
            else:
                callbacks = [ddl.keras.BroadcastCallback()] if way == "callback" else []
                model.fit(x, y, verbose=0, callbacks=callbacks)
        except SettingsDifferError as error:
            return str(error)
        except Exception as error:  # a function's, of tf.autograph, which quotes ours
            assert way == "loop" and "SettingsDifferError" in str(error), error
            return str(error)
        return ""

    def close() -> float:
        return float(np.nextafter(0.9, 1.0)) if last else 0.9

    kinds = [
        (f"{rank}'s SGD has momentum = 0.9, rank 0's has 0", lambda: sgd(0.1, 0.9 * last)),
        ("", lambda: sgd(0.1, momentum=close())),
        (
            f"{rank}'s Adam has clipnorm = 1, rank 0's has None",
            lambda: adam(clipnorm=1.0 if last else None),
        ),
        (f"{rank} has Adam, rank 0 SGD", lambda: (adam if last else sgd)(0.1)),
        (
            f"{rank}'s SGD has learning_rate.decay_steps = 12, rank 0's has 10",
            lambda: sgd(cosine(0.1, 10 + 2 * last)),
        ),
        (
            f"{rank}'s LossScaleOptimizer has inner_optimizer.momentum = 0.9, rank 0's has 0",
            lambda: scaling(sgd(0.1, 0.9 * last)),
        ),
        ("", lambda: Own(0.1)),
        ("", lambda: sgd(lambda: 0.1 + RANK * 0)),
    ]
    for way, some in (("fit", kinds), ("callback", kinds[:1]), ("loop", kinds[:1])):
        for wanted, make in some:
            got = said(ours(make()), way)
            assert (wanted in got) if wanted and SIZE > 1 else not got, (way, wanted, got)


@check
def keras_models_that_step_by_themselves_may_differ() -> None:
    """As with weights that are averaged now and then, and not at the end of a fit()."""

    class Alone(keras.Sequential):
        def train_step(self, data: object) -> dict[str, object]:
            for weight in self.trainable_variables:
                weight.assign_add(tf.ones_like(weight) * RANK)
            return {"loss": tf.constant(0.0)}

    model = Alone([keras.Input((5,)), keras.layers.Dense(3)])
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    x, y = (part.astype("float32") for part in map(my_part, whole_batch()))
    before = [np.asarray(v) for v in model.trainable_variables]
    for callbacks in ([ddl.keras.BroadcastCallback()], []):
        model.fit(x, y, verbose=0, callbacks=callbacks)
    if RANK:
        assert not np.array_equal(before[0], np.asarray(model.trainable_variables[0]))


@check
def keras_ranks_that_begin_apart_are_given_the_weights_of_the_first() -> None:
    x, y = (part.astype("float32") for part in map(my_part, whole_batch()))
    first = [np.asarray(v) for v in keras_model(1).trainable_variables]

    def optimizer() -> keras.Optimizer:
        return ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.0))

    def fits(model: keras.Model) -> None:
        model.compile(optimizer(), "mse")
        model.fit(x, y, verbose=0)

    def fits_resumed(model: keras.Model) -> None:
        built = optimizer()
        built.build(model.trainable_variables)
        built.iterations.assign(7)
        model.compile(built, "mse")
        model.fit(x, y, verbose=0)

    def loops(model: keras.Model, in_a_function: bool, reduced_by_hand: bool) -> None:
        averages = keras.optimizers.SGD(0.0) if reduced_by_hand else optimizer()

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            pairs = zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
                strict=True,
            )
            averages.apply_gradients(ddl.grads_reduce(pairs) if reduced_by_hand else pairs)

        run = tf.function(step) if in_a_function else step
        run()
        run()

    ways = [fits, fits_resumed]
    ways += [
        functools.partial(loops, in_a_function=graph, reduced_by_hand=by_hand)
        for graph in (True, False)
        for by_hand in ([True, False] if SIZE > 1 else [False])
    ]
    arrays._joins.clear()  # of other checks
    for way in ways:
        model = keras_model(RANK + 1)
        way(model)
        for mine, want in zip(model.trainable_variables, first, strict=True):
            assert np.asarray(mine).tobytes() == want.tobytes(), way


@check
def keras_ranks_without_data_begin_later() -> None:
    arrays._joins.clear()
    model = keras_model(1)
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for epoch in range(2):
        for _ in range(2 if epoch == 1 or RANK == SIZE - 1 else 0):
            step(tf.ones([2, 5]) * (RANK + 1.0))
        last = ddl.join()
        optimizer.build(model.trainable_variables)
        ddl.keras.broadcast_variables([*model.weights, *optimizer.variables], root=last)
    assert_same_everywhere(model.get_weights())


@check(least=2)
def keras_optimizers_are_told_apart_alike_where_a_rank_has_no_data_at_first() -> None:
    """Also those that are made in a thread, and a copy that one rank alone has made."""
    arrays._joins.clear()

    def made() -> keras.optimizers.Optimizer:
        return ddl.keras.DistributedOptimizer(keras.optimizers.SGD(1.0))

    def step(optimizer: keras.optimizers.Optimizer, variable: keras.Variable) -> None:
        optimizer.apply_gradients([(tf.fill([2], RANK + 1.0), variable)])

    (in_thread,) = in_threads(made, names=["maker"])
    optimizers = [made(), in_thread, made()]
    if RANK == 0:
        copy.deepcopy(optimizers[0])
    variables = [keras.Variable(np.zeros(2), dtype="float32") for _ in optimizers]
    for optimizer, variable in zip(optimizers[:2], variables, strict=False):
        if RANK == SIZE - 1:
            step(optimizer, variable)
    last = ddl.join()
    for optimizer, variable in zip(optimizers, variables, strict=True):
        optimizer.build([variable])
        ddl.keras.broadcast_variables([variable, *optimizer.variables], root=last)
    for optimizer, variable in zip(optimizers[::-1], variables[::-1], strict=True):
        before = variable.numpy()
        step(optimizer, variable)
        np.testing.assert_allclose(variable.numpy(), before - (SIZE + 1) / 2)


def tell_epochs(
    model: keras.Model,
    callbacks: list[keras.callbacks.Callback],
    epoch: int,
    logs: list[dict[str, float]],
) -> None:
    """What fit() tells callbacks of epochs of one step, which end so."""
    several = keras.callbacks.CallbackList(callbacks, model=model, steps=1)
    several.on_train_begin()
    for number, said in enumerate(logs, epoch):
        several.on_epoch_begin(number)
        several.on_train_batch_end(0, said)
        several.on_epoch_end(number, said)


@check
def keras_a_better_model_stays_where_a_later_try_is_worse() -> None:
    model = keras_model(1)
    if RANK > 0:
        return
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{SIZE} {{best}}"
    literal = str(folder).replace("{", "{{").replace("}", "}}")

    def train(epoch: int, *losses: float, name: str = "best.keras", **more: Any) -> list[str]:
        """As in a process of its own: which files are new."""
        before = {path: path.stat().st_mtime_ns for path in folder.glob("*.keras")}
        callback = ddl.keras.CheckpointCallback(
            f"{literal}/{name}", monitor="loss", save_best_only=True, mode="min", **more
        )
        tell_epochs(model, [callback], epoch, [{"loss": loss} for loss in losses])
        files = sorted(folder.glob("*.keras"))
        return [path.name for path in files if path.stat().st_mtime_ns != before.get(path)]

    assert train(0, 0.5, 0.3, 0.4) == ["best.keras"]
    assert train(2, 0.4, 0.35) == []
    assert train(2, 0.4, 0.35, save_freq=1) == []
    assert train(2, 0.4, 0.35, initial_value_threshold=0.38) == []
    assert train(2, 0.25, initial_value_threshold=0.1) == []
    assert train(2, 0.4, 0.2) == ["best.keras"]
    # A training that begins anew may be of other data.
    assert train(0, 0.9) == ["best.keras"]
    (folder / "best.keras").unlink()
    each = {"name": "model-{epoch}.keras"}
    assert train(0, 0.5, 0.3, **each) == ["model-1.keras", "model-2.keras"]
    assert train(2, 0.4, **each) == [] and train(2, 0.2, **each) == ["model-3.keras"]
    # What is no number is no best.
    assert train(0, float("nan")) == ["best.keras"]
    assert train(1, 0.7) == ["best.keras"]


@check
def keras_a_better_model_is_known_beside_files_that_note_no_best() -> None:
    model = keras_model(1)
    if RANK > 0:
        return
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{SIZE} best beside others"

    def train(epoch: int, *losses: float) -> None:
        """As in a process of its own."""
        best = {"monitor": "val_loss", "save_best_only": True}
        callbacks = [
            ddl.keras.CheckpointCallback(folder / "best-{epoch}.keras", **best),
            ddl.keras.CheckpointCallback(folder / "model-{epoch}.keras"),
        ]
        tell_epochs(model, callbacks, epoch, [{"val_loss": loss} for loss in losses])

    train(0, 0.5, 0.1, 0.4)
    train(3, 0.3)
    assert sorted(path.name for path in folder.glob("best-*")) == ["best-1.keras", "best-2.keras"]
    train(4, 0.05)
    assert (folder / "best-5.keras").exists()


def _weights_of(path: Path) -> bytes:
    return keras.models.load_model(path).get_weights()[0].tobytes()


@check
def keras_checkpoints_are_saved_on_rank_0_and_whole() -> None:
    # One folder for all ranks.
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{{odd}} {SIZE} checkpoints"
    os.environ["CHECKPOINT_DIR"] = str(folder)
    model = keras_model(1)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, y = map(my_part, whole_batch())

    def fit(*callbacks: keras.callbacks.Callback, epochs: int = 2) -> None:
        every = [ddl.keras.BroadcastCallback(), *callbacks]
        model.fit(x, y, epochs=epochs, verbose=0, callbacks=every)
        if SIZE > 1:
            ddl.barrier("saved")

    fit(ddl.keras.CheckpointCallback())
    assert sorted(os.listdir(folder)) == ["model-1.keras", "model-2.keras"]
    assert _weights_of(folder / "model-2.keras") == model.get_weights()[0].tobytes()
    folder = folder.with_name(f"{SIZE} checkpoints")  # braces in a path of one's own are fields
    os.environ["CHECKPOINT_DIR"] = str(folder)
    last = folder / "last.keras"
    fit(ddl.keras.CheckpointCallback(last, monitor="loss", save_best_only=True, mode="min"))
    assert last.exists()
    fit(ddl.keras.CheckpointCallback(save_weights_only=True), epochs=1)
    assert (folder / "model-1.weights.h5").exists()
    fit(ddl.keras.CheckpointCallback(folder / "step-{batch}.keras", save_freq=1), epochs=1)
    assert (folder / "step-1.keras").exists()

    whole = last.read_bytes()
    save = model.save

    def save_half(path: str, overwrite: bool) -> None:
        save(path, overwrite=overwrite)
        os.truncate(path, 100)
        raise InterruptedError("as one that was killed")

    if RANK == 0:
        model.save = save_half
        callback = ddl.keras.CheckpointCallback(last)
        callback.set_model(model)
        callback.on_epoch_begin(0)
        try:
            callback.on_epoch_end(0, {"loss": 1.0})
        except InterruptedError:
            assert last.read_bytes() == whole
        else:
            raise AssertionError("no error")
        assert {c.path.name for c in checkpoints.find(folder).checkpoints} >= {"last.keras"}
        assert not any(c.path.name.startswith(".") for c in checkpoints.find(folder).checkpoints)
    del os.environ["CHECKPOINT_DIR"]
    for callback_of in (ddl.keras.CheckpointCallback, ddl.keras.PreemptionCallback):
        try:
            callback_of()
        except ValueError as error:
            assert "CHECKPOINT_DIR is not set" in str(error)
            assert "ddl-run --manifest" in str(error)
        else:
            raise AssertionError("no error")


@check
def keras_a_try_that_goes_on_trains_all_epochs_that_are_left() -> None:
    """Also where the last number in a name is no epoch, and where one was saved in the middle."""
    folder = Path(os.environ["DDL_PROGRESS"]).parent
    x, y = map(my_part, whole_batch())
    steps, epochs = len(x), 3

    class Killed(keras.callbacks.Callback):
        def __init__(self, after: int) -> None:
            super().__init__()
            self._after = after

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if int(self.model.optimizer.iterations) == self._after:
                raise InterruptedError("as one that was killed")

    for number, (name, freq, killed, done) in enumerate(
        [
            ("model.{epoch:02d}-{loss:.2f}.keras", "epoch", steps + 2, 1),
            ("model-{epoch}.keras", 2, steps - 1, 0),
            ("model-{epoch}.keras", 2, steps + 2, 1),
            ("model-{epoch}.keras", steps, steps + 2, 1),
            ("step-{batch}.keras", 2, steps - 1, 0),
        ]
    ):
        place = folder / f"{SIZE} ranks, names {number}"

        def fit(*more: keras.callbacks.Callback, model: keras.Model, done: int = 0) -> list[float]:
            callbacks = [
                ddl.keras.BroadcastCallback(),
                ddl.keras.CheckpointCallback(place / name, save_freq=freq),  # noqa: B023
                *more,
            ]
            options = {"batch_size": 1, "verbose": 0, "initial_epoch": done, "epochs": epochs}
            return model.fit(x, y, callbacks=callbacks, **options).history["loss"]

        model = keras_model(1)
        model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        try:
            fit(Killed(killed), model=model)
        except InterruptedError:
            pass
        else:
            raise AssertionError("no end")
        if SIZE > 1:
            ddl.barrier("saved")
        path, found = ddl.keras.newest_checkpoint(place)
        assert path is not None and found == done, (name, freq, path, found)
        assert checkpoints.find(place).checkpoints[0].step == done, (name, freq)
        model = keras.models.load_model(path)
        model.compile(ddl.keras.DistributedOptimizer(model.optimizer), "mse")
        assert len(fit(model=model, done=found)) == epochs - done, (name, freq)


def _ends_preempted(fit: Callable[[], object], folder: Path, step: int) -> None:
    """A training of all ranks ends because it was asked to, and has left that step alone."""
    try:
        fit()
    except SystemExit as end:
        assert end.code == 0
    else:
        raise AssertionError("no end")
    assert os.listdir(folder) == [f"preempted-{step}"], os.listdir(folder)
    if SIZE > 1:
        ddl.barrier("all have looked")


@check
def keras_ranks_that_are_asked_to_end_go_on_with_the_batches_that_each_had_left() -> None:
    """Asked when some have joined, and again while batches that are done are passed over."""
    for passes in (1, 3):
        _ask_to_end_when_some_have_joined(passes)


def _ask_to_end_when_some_have_joined(passes: int) -> None:
    batches = 4 + 2 * RANK
    most = 4 + 2 * (SIZE - 1)
    generator = np.random.RandomState(RANK)
    x, y = generator.randn(batches, 5).astype("float32"), generator.randn(batches, 3)
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{SIZE} preempted {passes}"

    class AsksAtBatch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
            if batch == self.model.asked_at and RANK == SIZE - 1:
                os.kill(os.getpid(), signal.SIGURG)

    def fit(folder: Path, asked_at: int | None, most: int = most) -> keras.Model:
        """As in a process of its own."""
        preemption._forget()
        keras.utils.set_random_seed(RANK + 1)
        layers = [keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        model.asked_at = asked_at
        optimizer = ddl.keras.DistributedOptimizer(
            keras.optimizers.Adam(0.01), backward_passes_per_step=passes
        )
        model.compile(optimizer, "mse")
        callbacks = [ddl.keras.JoinCallback(), AsksAtBatch(), ddl.keras.PreemptionCallback(folder)]
        options = {"epochs": 2, "batch_size": 1, "shuffle": False, "verbose": 0}
        model.logs = model.fit(x[:most], y[:most], callbacks=callbacks, **options).history
        preemption._forget()
        return model

    undisturbed = fit(folder / "none", None)
    # Then nothing is passed over yet. Of three ranks the first has joined by the fifth batch.
    for asked_at in (most - 2, most - 4 if SIZE > 1 else 1):
        _ends_preempted(lambda at=asked_at: fit(folder, at), folder, most - 1)
    if SIZE == 1:
        shutil.copytree(folder, folder / "fewer")
        model = fit(folder / "fewer", None, most=2)
        # Both batches of the first epoch had been done, and those of the second are trained with.
        assert int(model.optimizer.iterations) == (most - 1 + 2) // passes
        (folder / "fewer").rmdir()
    model = fit(folder, None)
    assert model.logs == undisturbed.logs, (model.logs, undisturbed.logs)
    pairs = zip(
        [*model.weights, *model.optimizer.variables],
        [*undisturbed.weights, *undisturbed.optimizer.variables],
        strict=True,
    )
    assert all(np.array_equal(*map(np.asarray, pair)) for pair in pairs)
    assert int(model.optimizer.iterations) == 2 * most // passes


@check
def keras_checkpoints_that_are_further_than_a_place_of_their_epoch_stay() -> None:
    """Asked to make room at step 3, and killed at step 8: step 8 is what there is."""
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{SIZE} further"
    saved = folder / "model-0.keras"
    generator = np.random.RandomState(RANK)
    x, y = generator.randn(12, 5).astype("float32"), generator.randn(12, 3)

    class EndsAt(keras.callbacks.Callback):
        def __init__(self, step: int, asked: bool) -> None:
            super().__init__()
            self._step, self._asked = step, asked

        def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
            if batch == 0:
                begun.append(int(self.model.optimizer._iterations))

        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            if batch + 1 == self._step:
                if not self._asked:
                    raise InterruptedError("as one that was killed")
                os.kill(os.getpid(), signal.SIGURG)

    def fit(step: int, *, asked: bool = False, loads: bool = True) -> keras.Model:
        """As in a process of its own."""
        preemption._forget()
        path, done = ddl.keras.newest_checkpoint(folder)
        if path and loads:
            model = keras.models.load_model(path)
            optimizer = model.optimizer
        else:
            model = keras_model(1)
            optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(ddl.keras.DistributedOptimizer(optimizer), "mse")
        callbacks = [
            ddl.keras.BroadcastCallback(),
            ddl.keras.CheckpointCallback(folder / "model-{epoch}.keras", save_freq=2),
            EndsAt(step, asked),
            ddl.keras.PreemptionCallback(folder),
        ]
        options = {"batch_size": 1, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        try:
            model.fit(x, y, epochs=1, initial_epoch=done, **options)
        except (SystemExit, InterruptedError):
            pass
        else:
            raise AssertionError("no end")
        preemption._forget()
        if SIZE > 1:
            ddl.barrier("ended")
        return model

    def saved_after() -> int:
        return int(keras.models.load_model(saved).optimizer._iterations)

    begun: list[int] = []
    fit(3, asked=True)
    fit(8)
    assert saved_after() == 8
    # Nobody loads it, so it goes on from step 3, and saves nothing before that is done again.
    fit(3, loads=False)
    assert saved_after() == 8
    fit(9)
    assert begun == [0, 3, 3, 8], begun


@check
def keras_ranks_that_find_other_places_to_go_on_from_are_told() -> None:
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{SIZE} of rank {RANK}"
    if RANK == 0:
        partial = mid_epoch.begin(folder, 7)
        mid_epoch.write_model(partial, mid_epoch.Place(7, 0, 0, SIZE), [], [])
        mid_epoch.finish(partial, folder, 7)
    callback = ddl.keras.PreemptionCallback(folder)
    try:
        callback._go_on(1)  # a checkpoint of that epoch is there: nothing is read
    except RuntimeError as error:
        assert RANK > 0 and f"rank {RANK} does not find preempted-7 in {folder}" in str(error)
    else:
        assert RANK == 0


@check
def keras_fits_that_train_no_epoch_leave_what_another_one_goes_on_from() -> None:
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{SIZE} no epoch of rank {RANK}"
    partial = mid_epoch.begin(folder, 7)
    mid_epoch.write_model(partial, mid_epoch.Place(7, 0, 0, SIZE), [], [])
    mid_epoch.finish(partial, folder, 7)
    model = keras_model(1)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    x, y = map(my_part, whole_batch())
    callback = ddl.keras.PreemptionCallback(folder)
    model.fit(x, y, initial_epoch=3, epochs=3, verbose=0, callbacks=[callback])
    preemption._forget()
    assert (folder / "preempted-7").is_dir()


@check
def keras_steps_that_loss_scaling_skips_are_steps_to_go_on_after() -> None:
    """The optimizer counts none of them: its number says less than what is done."""
    batches, lost = 4, 2
    generator = np.random.RandomState(RANK)
    x, y = generator.randn(batches, 5).astype("float32"), generator.randn(batches, 3)
    x[:lost] = np.inf
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{SIZE} scaled"

    class AsksAtStep(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
            if self.model.epoch * batches + batch == self.model.asked_at:
                os.kill(os.getpid(), signal.SIGURG)

        def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self.model.epoch = epoch

    def fit(folder: Path, asked_at: int) -> keras.Model:
        """As in a process of its own."""
        preemption._forget()
        model = keras_model(1)
        model.asked_at = asked_at
        inner = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.01))
        model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
        _, done = ddl.keras.newest_checkpoint(folder)
        callbacks = [
            ddl.keras.BroadcastCallback(),
            AsksAtStep(),
            ddl.keras.PreemptionCallback(folder),
        ]
        options = {"batch_size": 1, "shuffle": False, "verbose": 0, "callbacks": callbacks}
        model.fit(x, y, epochs=3, initial_epoch=done, **options)
        preemption._forget()
        return model

    undisturbed = fit(folder / "none", -1)
    for asked_at in (batches - 1, batches + 1, 2 * batches):
        _ends_preempted(lambda at=asked_at: fit(folder, at), folder, asked_at + 1)
    model = fit(folder, -1)
    assert int(model.optimizer.iterations) == 3 * (batches - lost)
    pairs = zip(
        [*model.weights, *model.optimizer.variables],
        [*undisturbed.weights, *undisturbed.optimizer.variables],
        strict=True,
    )
    assert all(np.array_equal(*map(np.asarray, pair)) for pair in pairs)


@check
def keras_states_that_an_earlier_release_saved_are_gone_on_from() -> None:
    """Which knew of no other optimizer than compile()'s, and kept no note of what it trains."""
    x, y = (part.astype("float32") for part in map(my_part, whole_batch()))
    folder = Path(os.environ["DDL_PROGRESS"]).parent / f"{SIZE} earlier"

    def model(seed: int) -> keras.Model:
        made = keras_model(seed)
        made.compile(ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
        return made

    before, after = model(1), model(2)
    before.train_on_batch(x, y)
    saved = [*before.weights, *before.optimizer.variables]
    if RANK == 0:
        partial = mid_epoch.begin(folder, 7)
        mid_epoch.write_model(partial, mid_epoch.Place(7, 2, 0, SIZE), saved, [])
        (partial / "optimizers.json").unlink()
        mid_epoch.finish(partial, folder, 7)
    if SIZE > 1:
        ddl.barrier("saved")
    callback = ddl.keras.PreemptionCallback(folder)
    callback.set_model(after)
    callback.set_params({"steps": 4})
    callback.on_train_begin()
    callback.on_epoch_begin(2)
    preemption._forget()
    restored = [*after.weights, *after.optimizer.variables]
    for one, other in zip(restored, saved, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other)), one.path


@check(least=2)
def keras_files_that_all_ranks_save_are_warned_of() -> None:
    kinds = keras.callbacks
    own = Path(os.environ["DDL_PROGRESS"]).parent
    folder = Path("saved")  # nothing is
    dated = own / "2026-01-01"
    before = os.environ.get("CHECKPOINT_DIR")
    os.environ["CHECKPOINT_DIR"] = str(dated)
    for saves, words in (
        (kinds.ModelCheckpoint(folder / "best.keras"), "take ddl.keras.CheckpointCallback in its"),
        (kinds.ModelCheckpoint(dated / "best.keras"), "take ddl.keras.CheckpointCallback in its"),
        (kinds.ModelCheckpoint(folder / f"rank-{RANK}.keras"), ""),
        (kinds.ModelCheckpoint(dated / f"{RANK:03}" / "best.keras"), ""),
        # Where there are more ranks, the last one's path has another number.
        (
            kinds.ModelCheckpoint(folder / "run1" / "best.keras"),
            "take ddl.keras.CheckpointCallback in its" if SIZE > 2 else "",
        ),
        (kinds.BackupAndRestore(folder / "backup"), "take ddl.keras.PreemptionCallback in its"),
        (ddl.keras.CheckpointCallback(own / "whole.keras"), ""),
    ):
        model = keras_model(1)
        model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            for _ in range(2):
                model.fit(*map(my_part, whole_batch()), epochs=0, verbose=0, callbacks=[saves])
        warned = RANK == SIZE - 1 > 0 and bool(words)
        assert said.getvalue().count("WARNING: ") == warned, said.getvalue()
        assert not warned or words in said.getvalue(), said.getvalue()
    del os.environ["CHECKPOINT_DIR"]
    os.environ.update({"CHECKPOINT_DIR": before} if before else {})

"""What a script for Cray's plugin may do in TensorFlow 1: runs each check, says how it went.

Inputs differ by rank, index and step. The argument is a folder for the ranks to meet in.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import ml_comm as mc
import numpy as np
from speech import RANK, SIZE, SLOWNESS, say

# As scripts for Keras: the rank first, TensorFlow later.
mc.init_mpi()
assert (mc.get_rank(), mc.get_nranks()) == (RANK, SIZE) and "tensorflow" not in sys.modules

import tensorflow as tf  # noqa: E402
from ddl_ops import loader  # noqa: E402

FOLDER = Path(sys.argv[1])
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def error_of(kind: type[Exception], function: Callable[..., object], *arguments: object) -> str:
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError("no error")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60 * SLOWNESS
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody made {path.name}"
        time.sleep(0.002)


def mean_of_step(step: int) -> float:
    return step * SIZE + (SIZE - 1) / 2


def own(step: float) -> float:
    return float(step * SIZE + RANK)


@check
def every_op_is_there_though_the_library_came_first() -> None:
    names = "init bcast all_reduce all_reduce_n all_gather team_gradients"
    for name in (*names.split(), "ddl_size", "ddl_rank", "ddl_local_rank"):
        assert callable(getattr(loader.operations(), name)), name
    with tf.Session() as session:
        assert session.run(loader.operations().ddl_rank()) == RANK


@check
def gradients_may_be_made_before_init_and_not_run() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        (average,) = mc.gradients([tf.constant([own(1)])], 0)
        said = error_of(tf.errors.FailedPreconditionError, session.run, average)
        assert "ran before dl_comm.init(). Call init and config_team(0, ...)" in said, said
        mc.init(1, 3, 40, "tensorflow")
        said = error_of(tf.errors.FailedPreconditionError, session.run, average)
        assert "team 0 is not configured" in said, said
        mc.config_team(0, 0, 1, 1, 0, 0)
        assert session.run(average) == [mean_of_step(1)]
        (large,) = mc.gradients([tf.zeros([41])], 0)
        said = error_of(tf.errors.InvalidArgumentError, session.run, large)
        assert "41 elements, but dl_comm.init() was told of 40 at most" in said, said


@check
def a_sum_of_variables_is_no_length() -> None:
    """As the porting guide prints it: it means the sum of their sizes."""
    with tf.Graph().as_default():
        total = sum([tf.get_variable(name, [3]) for name in "ab"])
        said = error_of(TypeError, mc.init, 2, 1, total, "tensorflow")
        assert "msglen is" in said and "sum(numpy.prod(v.shape.as_list()) for v in" in said, said


@check
def blocking_gradients_are_averages() -> None:
    mc.config_team(0, 0, 9, 9, 0, 0)
    with tf.Graph().as_default(), tf.Session() as session:
        matrix = tf.constant([[own(1)] * 2] * 3)
        slices = tf.IndexedSlices(tf.constant([[own(2)]]), tf.constant([RANK]), tf.constant([4, 1]))
        double = tf.constant(own(3), tf.float64)
        half = tf.constant([own(4)], tf.float16)
        averages = mc.gradients([matrix, None, slices, double, half], 0)
        assert averages[1] is None
        present = [average for average in averages if average is not None]
        assert [average.dtype for average in present] == [
            tf.float32,
            tf.float32,
            tf.float64,
            tf.float16,
        ]
        first, rows, third, fourth = session.run(present)
        assert (first == np.full([3, 2], mean_of_step(1))).all()
        expected = np.zeros([4, 1], np.float32)
        for rank in range(SIZE):
            expected[rank] = (2 * SIZE + rank) / SIZE
        np.testing.assert_allclose(rows, expected, rtol=1e-6)
        assert third == mean_of_step(3) and fourth == [mean_of_step(4)]


def applied_by(steps: int, *plan: int) -> list[float]:
    """What each step of team 1 applies: 3 is the average of step 3. In two sessions."""
    mc.config_team(1, *plan)
    applied = []
    with tf.Graph().as_default():
        gradient = tf.placeholder(tf.float32, [2, 3])
        (average,) = mc.gradients([gradient * 1], 1)
        for first in (1, 1 + steps // 2):
            with tf.Session() as session:
                for step in range(first, first + steps // 2):
                    received = session.run(average, {gradient: np.full([2, 3], own(step))})
                    assert (received == received[0, 0]).all()
                    value = float(received[0, 0])
                    applied.append(round((value - mean_of_step(0)) / SIZE, 4) if value else 0)
    return applied


@check
def each_phase_applies_the_steps_that_it_should() -> None:
    assert applied_by(6, 0, 4, 4, 0, 0) == [1, 2, 3, 4, 5, 6]
    assert applied_by(6, 0, 2, 6, 0, 0) == [1, 2, 0, 3, 4, 5]
    assert applied_by(6, 0, -3, 6, 0, 0) == [0, 1, 2, 4, 5, 6]
    mixed = [round(2 + i - i / 11, 4) for i in range(1, 12)]
    assert applied_by(16, 1, 2, 99, 0, 0) == [1, 2, *mixed, 13, 14, 15]
    mixed = [round(1 + i + i / 11, 4) for i in range(1, 12)]
    assert applied_by(16, 1, -2, 99, 0, 0) == [0, 1, *mixed, 14, 15, 16]


@check
def a_variable_may_change_while_it_is_communicated() -> None:
    mc.config_team(1, 0, 0, 9)
    for resource in (False, True):
        with tf.Graph().as_default(), tf.variable_scope(f"r{resource}", use_resource=resource):
            variable = tf.get_variable("v", initializer=np.zeros([30], np.float32))
            (average,) = mc.gradients([variable], 1)
            value = tf.placeholder(tf.float32, [30])
            assign = tf.assign(variable, value)
            with tf.Session() as session:
                for step in range(1, 6):
                    session.run(assign, {value: np.full(30, own(step))})
                    received = session.run(average)
                    assert (received == (mean_of_step(step - 1) if step > 1 else 0)).all()
        mc.config_team(1, 0, 0, 9)


@check
def broadcasts_of_every_root() -> None:
    for root in range(SIZE):
        with tf.Graph().as_default(), tf.Session() as session:
            with tf.variable_scope("model", use_resource=root == 1):
                variables = [
                    tf.get_variable("matrix", initializer=np.full([2, 3], RANK + 0.5, np.float32)),
                    tf.get_variable("scalar", initializer=np.int64(RANK), trainable=False),
                    tf.get_variable("empty", initializer=np.zeros([0, 2], np.float32)),
                ]
            received = mc.broadcast(variables, root)
            assert [r.dtype for r in received] == [v.dtype.base_dtype for v in variables]
            assert [r.shape.as_list() for r in received] == [[2, 3], [], [0, 2]]
            session.run(tf.global_variables_initializer())
            matrix, scalar, empty = session.run(received)
            assert (matrix == root + 0.5).all() and scalar == root and empty.shape == (0, 2)
            assert session.run(variables[1]) == RANK  # new tensors, and no assignment


class BcastTensors(tf.train.SessionRunHook):
    """As scripts for the plugin write it."""

    def __init__(self) -> None:
        self.bcast = None

    def begin(self) -> None:
        if not self.bcast:
            new_vars = mc.broadcast(tf.trainable_variables(), 0)
            self.bcast = tf.group(
                *[tf.assign(v, new_vars[k]) for k, v in enumerate(tf.trainable_variables())]
            )

    def after_create_session(self, session, coord) -> None:
        session.run(self.bcast)
        values = [session.run(v) for v in tf.trainable_variables()]
        assert mc.check_buffers_match(values, 1) == 0


def model_fn(features, labels, mode, params):
    del mode
    weights = tf.get_variable("weights", [20, 1], initializer=tf.random_normal_initializer())
    loss = tf.reduce_mean((tf.matmul(features, weights) - labels) ** 2)
    optimizer = tf.train.GradientDescentOptimizer(0.05)
    grads_and_vars = optimizer.compute_gradients(loss)
    grads = mc.gradients([gv[0] for gv in grads_and_vars], params["team"])
    gs_and_vs = [(g, v) for (_, v), g in zip(grads_and_vars, grads, strict=True)]
    step = tf.train.get_global_step()
    train = optimizer.apply_gradients(gs_and_vs, step)
    return tf.estimator.EstimatorSpec(
        "train", loss=loss, train_op=train, training_hooks=[BcastTensors()]
    )


@check
def legacy_estimators_learn_with_the_hook_and_go_on_counting() -> None:
    random = np.random.RandomState(RANK)
    inputs = random.randn(64, 20).astype(np.float32)
    outputs = inputs @ np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    feed = tf.estimator.inputs.numpy_input_fn(inputs, outputs, 16, None, True)
    with tempfile.TemporaryDirectory() as folder:
        config = tf.estimator.RunConfig(tf_random_seed=RANK + 1, save_checkpoints_steps=50)
        estimator = tf.estimator.Estimator(model_fn, folder, config, {"team": 2})
        mc.config_team(2, 1, 40, 100, 0, 0)
        estimator.train(feed, steps=50)
        estimator.train(feed, steps=50)  # from the checkpoint, in the pipelined phase
        assert estimator.get_variable_names() == ["global_step", "weights"]
        weights = estimator.get_variable_value("weights")
    assert mc.check_buffers_match([weights], 1) == 0
    np.testing.assert_allclose(weights[:, 0], np.linspace(-1, 1, 20), atol=0.05)


@check
def monitored_sessions_learn_in_every_phase() -> None:
    random = np.random.RandomState(RANK)
    rows = random.randn(64, 20).astype(np.float32)
    expected = rows @ np.linspace(-1, 1, 20, dtype=np.float32)[:, None]
    for plan in ((0, 60, 60), (0, 6, 60), (1, 6, 60), (0, -54, 60), (1, -40, 60)):
        mc.config_team(1, *plan, 0, 0)
        with tf.Graph().as_default():
            tf.set_random_seed(RANK + 1)  # ranks would start apart
            weights = tf.get_variable("weights", [20, 1])
            loss = tf.reduce_mean((tf.matmul(rows, weights) - expected) ** 2)
            optimizer = tf.train.MomentumOptimizer(0.05, 0.5)
            pairs = optimizer.compute_gradients(loss)
            grads = mc.gradients([gradient for gradient, _ in pairs], 1)
            train = optimizer.apply_gradients(
                [
                    (gradient, variable)
                    for (_, variable), gradient in zip(pairs, grads, strict=True)
                ],
                tf.train.get_or_create_global_step(),
            )
            names = {variable.op.name for variable in tf.global_variables()}
            assert names == {"weights", "weights/Momentum", "global_step"}, names
            with tf.train.MonitoredTrainingSession(hooks=[BcastTensors()]) as session:
                before = session.run(loss)
                for _ in range(60):
                    session.run(train)
                after, values = session.run([loss, weights])
        average = np.array([after], np.float32)
        mc.average(average)
        assert average < 0.02 * before, (plan, before, average)
        assert mc.check_buffers_match([values], 1) == 0


@check
def training_is_that_of_one_process_with_the_gradients_of_the_step_before() -> None:
    blocking, steps, rate = 5, 40, 0.02
    rows = np.random.RandomState(1).randn(16 * SIZE, 4)
    expected = rows @ np.arange(4.0)
    own_rows, own_expected = rows[RANK::SIZE], expected[RANK::SIZE]
    mc.config_team(1, 0, blocking, steps, 0, 0)
    with tf.Graph().as_default(), tf.Session() as session:
        weights = tf.get_variable("weights", initializer=np.ones(4))
        loss = tf.reduce_mean((tf.linalg.matvec(own_rows, weights) - own_expected) ** 2)
        optimizer = tf.train.MomentumOptimizer(rate, 0.9)
        ((gradient, _),) = optimizer.compute_gradients(loss)
        train = optimizer.apply_gradients([(mc.gradients([gradient], 1)[0], weights)])
        session.run(tf.global_variables_initializer())
        for _ in range(steps):
            session.run(train)
        trained = session.run(weights)

    alone, momentum, before = np.ones(4), np.zeros(4), np.zeros(4)
    for step in range(1, steps + 1):
        now = 2 * rows.T @ (rows @ alone - expected) / len(rows)
        momentum = 0.9 * momentum + (now if step <= blocking else before)
        alone -= rate * momentum
        before = now if step > blocking else np.zeros(4)
    np.testing.assert_allclose(trained, alone, rtol=1e-5)  # the rate is rounded to float32


@check
def communication_of_a_step_runs_beside_the_computation_of_the_next() -> None:
    """Not by the clock: here a step of the others waits for rank 0 to compute the next one."""
    blocking, steps = 2, 6
    mc.config_team(1, 0, blocking, 99, 0, 0)
    step = 0

    def compute() -> np.float32:
        began = time.monotonic_ns() / 1000
        if step > blocking:
            if RANK == 0:
                (FOLDER / f"computes-{step}").touch()
            elif step < steps:
                wait_for(FOLDER / f"computes-{step + 1}")
        if RANK == 0:
            say(f"step {step} computes from {began:.3f}")
        return np.float32(own(step))

    with tf.Graph().as_default(), tf.Session() as session:
        gradient = tf.py_func(compute, [], tf.float32)
        gradient.set_shape([])
        (average,) = mc.gradients([gradient], 1)
        for step in range(1, steps + 1):
            received = session.run(average)
            applied = step if step <= blocking else step - 1 if step > blocking + 1 else None
            assert received == (mean_of_step(applied) if applied else 0), (step, received)
        say(f"op {average.op.name} of process {os.getpid()}")


def reductions(train: tf.Operation) -> list[str]:
    ops = train.graph.get_operations()
    return sorted(op.type for op in ops if op.type in ("AllReduceN", "TeamGradients"))


@check
def hooks_of_ddl_leave_averages_alone() -> None:
    import ddl  # noqa: F401  for its effect: it hooks the optimizers

    mc.config_team(1, 0, 9, 9)
    for clip in (False, True):
        with tf.Graph().as_default(), tf.Session() as session:
            variable = tf.get_variable("v", initializer=0.0)
            optimizer = tf.train.GradientDescentOptimizer(1.0)
            pairs = optimizer.compute_gradients(own(1) * variable)
            grads = mc.gradients([gradient for gradient, _ in pairs], 1)
            if clip:
                grads, _ = tf.clip_by_global_norm(grads, 1e6)
            train = optimizer.apply_gradients(zip(grads, [variable], strict=True))
            # A clipped one is not known to be an average: that is said, and harms nothing else.
            assert reductions(train) == ["AllReduceN"] * clip + ["TeamGradients"]
            session.run(variable.initializer)
            session.run(train)
            np.testing.assert_allclose(session.run(variable), -mean_of_step(1), rtol=1e-6)


@check
def a_step_that_fails_waits_for_nobody() -> None:
    mc.config_team(1, 0, 9, 9)
    with tf.Graph().as_default(), tf.Session() as session:
        good = tf.placeholder(tf.float32, [])
        late = tf.numpy_function(lambda: time.sleep(0.3) or np.float32(1), [], tf.float32)
        loss = tf.debugging.check_numerics(late / good, "loss")
        (average,) = mc.gradients([tf.constant([own(1)])], 1)
        start = time.monotonic()
        if RANK == 0 and SIZE > 1:
            said = error_of(
                tf.errors.InvalidArgumentError, session.run, [average, loss], {good: 0.0}
            )
            assert "loss" in said and time.monotonic() - start < 1.5 * SLOWNESS, (
                "it waited for rank 1"
            )
        else:
            time.sleep(2 * SLOWNESS if SIZE > 1 else 0)
            assert session.run(average) == [mean_of_step(1)]
        assert session.run([average, loss], {good: 1.0}) == [[mean_of_step(1)], 1]


@check
def last_finalize_may_come_inside_a_session_and_twice() -> None:
    mc.config_team(1, 0, 0, 9)
    with tf.Graph().as_default(), tf.Session() as session:
        (average,) = mc.gradients([tf.constant([own(1)])], 1)
        assert session.run(average) == [0]  # and nobody asks for the average itself
        mc.finalize()
        mc.finalize()
        assert session.run(tf.constant(1.0)) == 1
        assert "none after the shutdown" in error_of(
            tf.errors.FailedPreconditionError, lambda: [session.run(average) for _ in range(2)]
        )


if __name__ == "__main__":
    estimators = importlib.util.find_spec("tensorflow_estimator") is not None
    for function in CHECKS:
        if function.__name__.startswith("legacy_") and not estimators:
            continue
        try:
            function()
        except Exception:
            say(f"{function.__name__}: failed")
            traceback.print_exc()
            sys.exit(1)
        say(f"{function.__name__}: ok")

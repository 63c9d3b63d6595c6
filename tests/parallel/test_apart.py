"""Ranks that end well and did not train one model, under the launcher as the train task has it."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddl_airflow.core.job import JobSpec, JobState, JobStatus
from ddl_airflow.launchers.local import LocalLauncher
from tests.limits import within
from tests.parallel.conftest import OPS_LIB, REPOSITORY, SCRIPTS

pytest.importorskip("tensorflow")


@dataclass(frozen=True)
class Trained:
    """How a job ended, and what each rank printed."""

    status: JobStatus
    output: tuple[str, ...]


@pytest.fixture
def trained(mpirun: str, tmp_path: Path, monkeypatch) -> Callable[..., Trained]:
    """trained(script, ranks=2) -> how it ended, where its ranks are to train one model."""
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{OPS_LIB / 'python'}:{SCRIPTS}")

    def run(script: str, command: str = "python train.py", ranks: int = 2) -> Trained:
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        (tmp_path / "result").mkdir()
        launcher = LocalLauncher()
        job = JobSpec(
            job_id="apart/train-1",
            command=command,
            nodes=ranks,
            slots=1,
            python=sys.executable,
            folder=tmp_path,
            record_dir=tmp_path / "records",
            log_dir=tmp_path / "logs",
            env={"RESULT_DIR": str(tmp_path / "result"), "TF_CPP_MIN_LOG_LEVEL": "3"},
            averages=True,
        )
        handle = launcher.submit(launcher.render(job))
        deadline = time.monotonic() + within(180)
        try:
            while not (status := launcher.status(handle)).ended:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            launcher.cancel(handle, 1.0)
        return Trained(
            status, tuple(launcher.log(handle, rank).read_text() for rank in range(ranks))
        )

    return run


KERAS = """
    import numpy as np
    import ddl
    import keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    x = np.random.randn(8, 3) + ddl.rank()
    y = np.random.randn(8, 2)
"""


def test_keras_without_a_distributed_optimizer_fails(trained):
    ended = trained(
        KERAS
        + """
    import os
    from ddl_ops import lifecycle
    model.compile("sgd", "mse")
    for _ in range(2):
        model.fit(x, y, verbose=0)
    lifecycle.shutdown()  # else mpirun ends the ranks that are not as far
    os._exit(0)
    """
    )
    assert ended.status.apart, ended
    # On the page and the command line as for a script without ddl: test_mistakes.py.
    words = "ranks 0 and 1 imported ddl, computed gradients and averaged none. In Keras wrap"
    assert words in ended.status.reason
    assert "ddl.keras.DistributedOptimizer(optimizer)" in ended.status.reason
    warning = "ddl: rank 0: WARNING: the optimizer 'sgd' does not average gradients: each of the 2"
    assert [text.count(warning) for text in ended.output] == [1, 0]


def test_a_second_fit_that_averages_with_nobody_fails(trained):
    ended = trained(
        KERAS
        + """
    import ddl.keras
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    model.fit(x, y, verbose=0, callbacks=[ddl.keras.BroadcastCallback()])
    model.compile("sgd", "mse")
    model.fit(x, y, verbose=0)
    """
    )
    assert ended.status.apart, ended
    words = "ranks 0 and 1 updated weights with an optimizer that does not average gradients, as"
    assert words in ended.status.reason


TWO = """
    import tensorflow as tf
    import ddl.keras
    second = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    pairs = [
        (model, ddl.keras.DistributedOptimizer(keras.optimizers.SGD())),
        (second, WRAP(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()))),
    ]

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(second(model(x)) ** 2)
            scaled = pairs[1][1].scale_loss(loss)
        for (one, optimizer), value in zip(pairs, (loss, scaled)):
            grads = tape.gradient(value, one.trainable_variables)
            optimizer.apply(grads, one.trainable_variables)

    for _ in range(2):
        step()
"""


@pytest.mark.parametrize("wrap", ["", "ddl.keras.DistributedOptimizer"])
def test_a_loop_with_an_optimizer_that_does_not_average_fails_though_another_does(trained, wrap):
    ended = trained(KERAS + TWO.replace("WRAP", wrap))
    assert ended.status.apart == (not wrap), ended
    assert (ended.status.state is JobState.SUCCEEDED) == bool(wrap), ended
    if not wrap:
        assert "or a second model has. Wrap each: ddl.keras.Distr" in ended.status.reason


def test_weights_that_one_rank_changes_between_two_fits_are_made_equal(trained):
    ended = trained(
        KERAS
        + """
    import ddl.keras
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    for number in range(3):
        model.fit(x, y, verbose=0)
        if number == 1 and ddl.rank() == 0:
            model.set_weights([weight + 1 for weight in model.get_weights()])
    print("sum", *ddl.allgather(model.layers[0].kernel[:1, 0]).numpy())
    """
    )
    assert ended.status.state is JobState.SUCCEEDED, ended
    for text in ended.output:
        _, first, second = text[text.index("sum ") :].split()
        assert first == second
    assert "ddl: rank 0: the ranks began with different weights" in ended.output[0]


def test_to_average_the_loss_alone_is_not_enough(trained):
    ended = trained(
        KERAS
        + """
    import tensorflow as tf
    optimizer = keras.optimizers.SGD()
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    print("loss", float(ddl.allreduce(loss)), ddl.allreduce_n([loss]))
    """
    )
    assert ended.status.apart, ended
    assert "ranks 0 and 1 imported ddl, computed gradients and averaged" in ended.status.reason


def test_tensorflow_1_that_imports_ddl_after_its_optimizer_fails(trained):
    ended = trained(
        """
        import tensorflow.compat.v1 as tf
        tf.disable_eager_execution()
        weight = tf.get_variable("weight", [3])
        train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(weight**2))
        import ddl
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
        """
    )
    assert "computed gradients and averaged none" in ended.status.reason, ended
    assert "put `import ddl` before the line that makes the optimizer" in ended.status.reason


def test_a_training_that_is_found_done_succeeds(trained):
    """As in an experiment that an earlier run has trained to its end."""
    ended = trained(
        KERAS
        + """
    import ddl.keras
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    callbacks = [ddl.keras.BroadcastCallback()]
    model.fit(x, y, initial_epoch=3, epochs=3, verbose=0, callbacks=callbacks)
    print(model.evaluate(x, y, verbose=0))
    """
    )
    assert ended.status.state is JobState.SUCCEEDED, ended


ARRAYS = """
    import sys
    import numpy as np
    import dl_comm as mc
    mc.init(1, 1, 10)
    mc.config_team(0, 0, 5, 5)
    if sys.argv[1] == "averages":
        mc.gradients([np.ones(3, "float32")], 0)
    mc.finalize()
"""


def test_one_program_after_the_other_is_one_rank(trained):
    """Of a shell's two, only the first trains; and none needs TensorFlow."""
    ended = trained(ARRAYS, "python train.py averages && python train.py evaluates")
    assert ended.status.state is JobState.SUCCEEDED, ended


def test_a_rank_that_never_imports_ddl_is_named(trained):
    ended = trained("print('trained')", ranks=3)
    assert ended.status.apart, ended
    assert "each a model of its own: ranks 0 to 2 did not import ddl. Write" in ended.status.reason


STEPS = """
    import ddl.keras
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    class Differs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = epoch if ddl.rank() else -epoch
    x, y = np.tile(x, (4, 1)), np.tile(y, (4, 1))
"""


@pytest.mark.parametrize(
    ("fit", "said"),
    [
        (
            "model.fit(x[ddl.rank():], y[ddl.rank():], batch_size=31, epochs=9, verbose=0)",
            "Rank 1 has already ended its script, but rank 0 still averages gradients. Let all",
        ),
        (
            "stops = keras.callbacks.EarlyStopping('val_loss', patience=1)\n"
            "    model.fit(x, y, epochs=9, verbose=0, callbacks=[ddl.keras.BroadcastCallback(), "
            "Differs(), stops])",
            "Rank 1 is at the end of fit(), rank 0 averages gradients. Does each rank's val_loss "
            "differ? Put ddl.keras.MetricAverageCallback before EarlyStopping",
        ),
    ],
    ids=["steps", "stopped"],
)
def test_keras_that_ends_alone_says_why_in_one_sentence(trained, fit, said):
    ended = trained(f"{KERAS}{STEPS}\n    {fit}\n")
    failure = ended.status.failure
    assert failure is not None and failure.exception.endswith("Error"), ended
    assert failure.reason.partition(": ")[2].startswith(said)
    assert "ddl.keras.MetricAverageCallback before EarlyStopping" in failure.reason
    assert "train.py:" in failure.reason
    text = ended.output[failure.rank]
    lines = text[text.index("Traceback") :].splitlines()
    assert len(lines) == 4, text
    assert lines[1].startswith('  File "') and "train.py" in lines[1]
    assert said in lines[3]

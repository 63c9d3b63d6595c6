"""Scripts for Horovod on two ranks, started as a person starts them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.limits import within
from tests.parallel.conftest import HOROVOD_PATHS
from tests.soak.driver import mpirun_command

SCRIPT = Path(__file__).resolve().parent / "scripts" / "horovod_checks.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def job(mpirun, run_command):
    horovodrun = [sys.executable, "-c", "from ddl_ops.horovodrun import main; main()"]
    # Four bytes: each gradient travels alone.
    flags = ["-np", "2", "-H", "localhost:2", "--cycle-time-ms", "1", "--fusion-threshold-mb=4e-6"]
    environment = {"DDL_STALL_TIMEOUT": "60"}
    return run_command([*horovodrun, *flags, "python", str(SCRIPT)], environment, 240)


def test_horovodrun_names_flags_without_effect_and_ends_well(job):
    assert "horovodrun: --cycle-time-ms has no effect here\n" in job.output
    assert job.returncode == 0, job.output


@pytest.mark.parametrize("name", CHECKS)
def test_check_of_horovod_passes_on_every_rank(job, name):
    said = [line for rank in range(2) for line in job.lines_of(rank)]
    assert [line for line in said if line.startswith(f"{name}:")] == [f"{name}: ok"] * 2, job.output


@pytest.fixture
def output_of(run_command, tmp_path: Path) -> Callable[..., str]:
    """output_of(script, **environment): of a script for Horovod that Python alone starts."""

    def run(script: str, **environment: str) -> str:
        (main := tmp_path / "main.py").write_text(script)
        paths = {"PYTHONPATH": HOROVOD_PATHS}
        return run_command([sys.executable, str(main)], paths | environment, 120).output

    return run


def test_horovod_run_takes_functions_of_the_main_script(mpirun, output_of):
    output = output_of(
        "import horovod\n"
        "def add(a):\n"
        "    import horovod.tensorflow as hvd\n"
        "    hvd.init()\n"
        "    later = hvd.broadcast_object((lambda: a) if hvd.rank() == 0 else None)\n"
        "    return hvd.rank() + later()\n"
        "if __name__ == '__main__':\n"
        "    print('returned', horovod.run(add, (10,), None, 2, use_gloo=False, use_mpi=True))\n"
    )
    assert "returned [10, 11]\n" in output, output


@pytest.mark.parametrize("name", ["models", "util"])
def test_horovod_run_finds_modules_beside_the_script(
    mpirun, run_command, tmp_path: Path, name: str
):
    """Those of the script, also where Horovod has some of the same name."""
    (tmp_path / f"{name}.py").write_text("def twice(a):\n    return 2 * a\n")
    (tmp_path / "main.py").write_text(
        f"import {name}\n"
        "import horovod\n"
        "def main(a):\n"
        f"    return {name}.twice(a)\n"
        "if __name__ == '__main__':\n"
        "    print('returned', horovod.run(main, (3,), np=1))\n"
    )
    command = ["env", "-C", str(tmp_path), sys.executable, "main.py"]
    ended = run_command(command, {"PYTHONPATH": HOROVOD_PATHS}, 120)
    assert "returned [6]\n" in ended.output, ended.output


def test_a_script_without_horovodrun_updates_a_row_of_several_slices_once(output_of):
    output = output_of(
        "import keras\n"
        "import tensorflow as tf\n"
        "import horovod.tensorflow as hvd\n"
        "hvd.init()\n"
        "table = keras.Variable([[1.0], [1.0]])\n"
        "optimizer = hvd.DistributedOptimizer(keras.optimizers.Adagrad(0.1))\n"
        "slices = tf.IndexedSlices(tf.fill([3, 1], 2.0), tf.constant([1, 1, 1]), [2, 1])\n"
        "optimizer.apply_gradients([(slices, table)])\n"
        "print('table %.4f %.4f' % tuple(table.numpy().ravel()))\n"
    )
    # 1 - 0.1 * 6 / sqrt(0.1 + 6 ** 2)
    assert "table 1.0000 0.9001\n" in output, output


_BEGINS = """
import sys
import keras
import horovod.keras as hvd
import numpy as np

class Own(keras.callbacks.Callback):
    pass

def fit(*callbacks):
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(np.ones([8, 4]), np.ones([8, 1]), verbose=0, callbacks=list(callbacks))

hvd.init()
{before}
print("<%d> begins" % hvd.rank(), file=sys.stderr, flush=True)
fit(keras.callbacks.History())
fit()
print("<%d> ended" % hvd.rank(), flush=True)
"""


@pytest.mark.parametrize(
    ("before", "warned"), [("fit(Own())", True), ("hvd.broadcast_object(1, 0)", False)]
)
def test_a_fit_that_nothing_was_broadcast_before_is_warned_of_once(
    mpirun, run_command, tmp_path: Path, before: str, warned: bool
):
    (script := tmp_path / "train.py").write_text(_BEGINS.format(before=before))
    environment = {"PYTHONPATH": HOROVOD_PATHS}
    ended = run_command(mpirun_command(2, sys.executable, str(script)), environment, 240)
    assert all(f"<{rank}> ended" in ended.output for rank in range(2)), ended.output
    said = ended.output.split("<0> begins")
    words = "ddl: rank 0: WARNING: fit() begins, and no rank has broadcast its weights"
    assert [text.count(words) for text in said] == [0, int(warned)], ended.output
    assert "rank 1: WARNING: fit() begins" not in ended.output


_MOMENTS = """
import keras
import horovod.keras
import horovod.tensorflow as hvd
import tensorflow as tf

WAY = {way!r}
hvd.init()
x = tf.ones([8, 4])
if "TensorFlow 1" in WAY:
    tf.compat.v1.disable_v2_behavior()
    x = tf.constant(1.0, shape=[8, 4])
layers = [hvd.SyncBatchNormalization()]
if hvd.rank() == 0:
    if "another" in WAY:  # to look at
        hvd.SyncBatchNormalization()(x)
        layers = [hvd.SyncBatchNormalization()]
    else:
        layers.append(hvd.SyncBatchNormalization())
try:
    if "TensorFlow 1" in WAY:
        for layer in layers:
            x = layer(x, training=True)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(x)
    else:
        model = keras.Sequential([keras.Input([4]), *layers, keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.fit(x, x[:, :1], verbose=0)
except tf.errors.OpError as error:
    print("<%d> it failed:" % hvd.rank(), " ".join(str(error).split()), flush=True)
else:
    print("<%d> it went on" % hvd.rank(), flush=True)
"""


@pytest.mark.parametrize("way", ["a layer more", "another layer", "another layer, TensorFlow 1"])
def test_layers_of_one_rank_alone_are_an_error_that_names_the_ranks(
    mpirun, run_command, tmp_path: Path, way: str
):
    (script := tmp_path / "train.py").write_text(_MOMENTS.format(way=way))
    environment = {"PYTHONPATH": HOROVOD_PATHS, "DDL_STALL_TIMEOUT": f"{within(3):.1f}"}
    ended = run_command(mpirun_command(2, sys.executable, str(script)), environment, 240)
    for rank in range(2):
        (said,) = [line for line in ended.lines_of(rank) if line.startswith("it ")]
        assert said.startswith("it failed:") and "SyncBatchNormalization.mean" in said, said
        other = 'rank 1 did not come within .*; rank 1 waits for AllReduce "'
        assert re.search(other if "1" in way else 'rank 1 runs .*, rank 0 runs AllReduce "', said)


@pytest.fixture
def keras_2() -> dict[str, str]:
    """The environment in which tf.keras is Keras 2."""
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras not installed: pip install -r requirements/legacy.txt")
    return {"TF_USE_LEGACY_KERAS": "1"}


def test_keras_2_trains_with_every_callback_of_horovod_keras(output_of, keras_2, tmp_path: Path):
    output = output_of(
        "from tensorflow import keras\n"
        "import horovod.keras as hvd\n"
        "import numpy as np\n"
        "hvd.init()\n"
        "model = keras.Sequential([keras.layers.Dense(1, input_shape=(2,))])\n"
        "model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), 'mse')\n"
        "state = hvd.elastic.KerasState(model, batch=0, epoch=0)\n"
        "for one in (\n"
        "    hvd.callbacks.BroadcastGlobalVariablesCallback(0),\n"
        "    hvd.callbacks.MetricAverageCallback(),\n"
        "    hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5),\n"
        "    hvd.callbacks.LearningRateWarmupCallback(0.1, 1),\n"
        "    hvd.callbacks.BestModelCheckpoint(monitor='loss'),\n"
        "    hvd.elastic.CommitStateCallback(state),\n"
        "    hvd.elastic.UpdateBatchStateCallback(state),\n"
        "    hvd.elastic.UpdateEpochStateCallback(state),\n"
        "):\n"
        "    model.fit(np.ones([4, 2]), np.ones([4, 1]), 2, verbose=0, callbacks=[one])\n"
        "    print(type(one).__name__, 'ok')\n"
        "print('epoch', state.epoch)\n",
        CHECKPOINT_DIR=str(tmp_path),
        **keras_2,
    )
    said = [line.removesuffix(" ok") for line in output.splitlines() if line.endswith(" ok")]
    assert len(said) == 8 and "epoch 1\n" in output, output


def test_a_model_is_loaded_by_the_keras_that_has_saved_it(output_of, keras_2, tmp_path: Path):
    """Where tf.keras is Keras 2, and `import keras` gives Keras 3."""
    output = output_of(
        "import keras\n"
        "import tensorflow as tf\n"
        "import horovod.keras as hvd\n"
        "hvd.init()\n"
        "for ours, name in ((tf.keras, '2'), (keras, '3')):\n"
        "    model = ours.Sequential([ours.layers.Dense(1)])\n"
        "    model.build((None, 2))\n"
        "    model.compile(ours.optimizers.SGD(0.1), ours.losses.MeanSquaredError())\n"
        "    for end in ('.keras', '.h5', ''):\n"
        f"        path = f'{tmp_path}/{{name}}{{end}}'\n"
        "        if end or name == '2':\n"
        "            model.save(path)\n"
        "            loaded = hvd.load_model(path)\n"
        "            distributed = hasattr(loaded.optimizer, '_hvd')\n"
        "            print(name, isinstance(loaded, ours.Model), distributed)\n",
        **keras_2,
    )
    said = [line for line in output.splitlines() if line.endswith((" True", " False"))]
    assert said == [*["2 True True"] * 3, *["3 True True"] * 2], output

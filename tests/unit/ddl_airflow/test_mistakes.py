"""Mistakes that authors make. What ends the log, or validate, names the cause and the cure.

Each is made in a manifest and a script that work, which the last test here shows. They go the road
that Airflow's tasks go, step by step, as far as it takes them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from airflow.sdk.exceptions import AirflowException

from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.manifest import load_manifest
from ddl_airflow.manifest_dag import dag_from

# An Airflow in an environment of its own has no TensorFlow.
RANKS_PYTHON = os.environ.get("AIRFLOW__DDL__PYTHON", sys.executable)
MANIFEST = """\
model_definition:
  name: digits
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: cpu, nodes: 2}
training_data_reference:
  type: fs
  source: {path: ./data}
training_results_reference:
  type: fs
  target: {path: ./results}
parameters:
  epochs: {default: 1, minimum: 1, maximum: 10}
evaluation: {metric: accuracy, minimum: 0.0}
transform: {sample: test.npz}
"""
SCRIPT = """\
import os

import ddl
import ddl.keras
import keras
import numpy as np

data = np.load(os.path.join(os.environ["DATA_DIR"], "train.npz"))
x, y = (data[name][ddl.rank() :: ddl.size()] for name in ("x", "y"))
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation="softmax")])
optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [ddl.keras.BroadcastCallback(), ddl.keras.ProgressCallback()]
model.fit(x, y, 8, epochs=int(os.environ["PARAM_EPOCHS"]), verbose=0, callbacks=callbacks)
if ddl.rank() == 0:
    model.save(os.path.join(os.environ["RESULT_DIR"], "model.keras"))
"""
TF1 = """\
import os

import ddl
import tensorflow as tf

w = tf.get_variable("w", [4])
train = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_sum(w * w))
saver = tf.train.Saver()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(train)
    saver.save(session, os.path.join(os.environ["RESULT_DIR"], "w"), 1)
"""
# What needs no TensorFlow to go wrong.
PLAIN = """\
import os

with open(os.path.join(os.environ["DATA_DIR"], "train.npz"), "rb") as file:
    data = file.read()
epochs = int(os.environ["PARAM_EPOCHS"])
"""
# A training that is done: its model is put where SCRIPT would leave it.
TRAINED = """\
import os
import shutil

shutil.copy("trained.keras", os.path.join(os.environ["RESULT_DIR"], "model.keras"))
"""
ALONE = {"nodes: 2": "nodes: 1"}


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        cause, cure: regular expressions that the first line of what ends the road must match.
        manifest, script: what is replaced in them by what.
        beside: further files beside the manifest, by name.
        of: the script.
    """

    cause: str
    cure: str
    manifest: Mapping[str, str] = field(default_factory=dict)
    script: Mapping[str, str] = field(default_factory=dict)
    of: str = SCRIPT
    beside: Mapping[str, str] = field(default_factory=dict)


FIT = "model.fit(x, y, 8,"
SAVE = 'model.save(os.path.join(os.environ["RESULT_DIR"], "model.keras"))'
COMMAND = "command: python train.py"
DATA = "type: fs\n  source: {path: ./data}"
DATA_IN_BUCKET = "type: s3\n  connection: {}\n  source: {{bucket: some-data}}"
WRAPPED = "ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))"
LOADED = """\
model.save(f"{ddl.rank()}.keras")
model = keras.models.load_model(f"{ddl.rank()}.keras")
"""

MISTAKES = {
    # --- in the manifest
    "a field is misspelled": Mistake(
        "manifest.yml:5: .*comand: unknown field", "Did you mean command", {"command:": "comand:"}
    ),
    "tabs": Mistake("manifest.yml:3: .*tab", "spaces", {"  framework": "\tframework"}),
    "no colon": Mistake("manifest.yml:3: ", "colon", {"name: digits": "name digits"}),
    "a number as a word": Mistake("nodes.*two", "number", {"nodes: 2": "nodes: two"}),
    "no such kind of node": Mistake("v100x9b", "v100|compute", {"name: cpu": "name: v100x9b"}),
    "one field twice": Mistake(
        "twice|duplicate|again",
        "[Dd]elete|one",
        {"  name: digits\n": "  name: digits\n  name: numbers\n"},
    ),
    "the bounds exclude the default": Mistake(
        "parameters.epochs.*(default|minimum)",
        "between|maximum|[Ww]rite|Give",
        {"default: 1,": "default: 20,"},
    ),
    "a parameter that is not there": Mistake(
        "epoch", "Did you mean epochs|epochs", {COMMAND: COMMAND + " {{ params.epoch }}"}
    ),
    "four fields of cron": Mistake(
        "schedule", "\\* \\*", {"transform:": 'schedule: "0 3 * *"\ntransform:'}
    ),
    "a regular expression without a group": Mistake(
        r"metrics\[0\].regex",
        r"\( \)",
        {"transform:": "metrics: [{name: loss, regex: 'loss='}]\ntransform:"},
    ),
    "an old framework's field": Mistake(
        "horovod", "distribution|mpi", {"transform:": "distribution: horovod\ntransform:"}
    ),
    # --- found by stage-data
    "a misspelled script": Mistake(
        "'trian.py'", "Did you mean 'train.py'", {"train.py": "trian.py"}
    ),
    "a script with a syntax error": Mistake(
        r"train.py:1\b.*(never closed|not valid Python)",
        "not valid Python",
        script={"import os\n": "import (os\n"},
    ),
    "no such folder of data": Mistake("dta", "path|There is", {"./data": "./dta"}),
    "no such connection": Mistake(
        "my_s4",
        "[Cc]reate|[Aa]dd|Connections",
        {DATA: DATA_IN_BUCKET.format("{conn_id: my_s4}")},
    ),
    "a variable that is not set": Mistake(
        "DDL_KEY_OF_NOBODY",
        "[Ss]et|[Ee]xport",
        {
            DATA: DATA_IN_BUCKET.format(
                "{endpoint_url: 'http://127.0.0.1:9', access_key_id: '${DDL_KEY_OF_NOBODY}', "
                "secret_access_key: '${DDL_KEY_OF_NOBODY}'}"
            )
        },
    ),
    # --- found by train
    "no ddl at all": Mistake("import ddl|ddl", "distribution: independent|import ddl", of=PLAIN),
    "an optimizer as it is": Mistake(
        "averag|reduc",
        "DistributedOptimizer",
        script={
            WRAPPED: "keras.optimizers.SGD(0.1)",
            "ddl.keras.BroadcastCallback(), ": "",
        },
    ),
    "an optimizer as it was loaded": Mistake(
        "averag",
        "DistributedOptimizer",
        script={FIT: LOADED + FIT},
    ),
    "wrapped twice": Mistake(
        "distributed already",
        "once",
        script={
            WRAPPED: f"ddl.keras.DistributedOptimizer({WRAPPED})",
        },
    ),
    "uneven shares": Mistake(
        "steps",
        "steps_per_epoch|take|JoinCallback",
        script={FIT: f"x, y = (x, y) if ddl.rank() else (x[:8], y[:8])\n{FIT}"},
    ),
    "each rank stops by its own loss": Mistake(
        "rank|epoch",
        "MetricAverageCallback",
        script={
            FIT: "class Stop(keras.callbacks.EarlyStopping):\n"
            "    def get_monitor_value(self, logs):\n"
            "        return 1.0 + ddl.rank() * len(self.model.history.epoch) * -0.1\n"
            "callbacks.append(Stop('loss', patience=0))\n"
            "os.environ['PARAM_EPOCHS'] = '6'\n" + FIT
        },
    ),
    "one rank has another model": Mistake(
        "rank",
        "same|all ranks|every rank",
        script={"Dense(4,": "Dense(4 if ddl.rank() else 5,"},
    ),
    "rank 0 averages alone": Mistake(
        "rank",
        "all ranks|every rank|each rank",
        script={SAVE: "print(ddl.allreduce(np.ones(2, np.float32)))"},
    ),
    "a file in another folder": Mistake(
        "train.py:3.*'train.npz'",
        "DATA_DIR",
        script={'os.path.join(os.environ["DATA_DIR"], "train.npz")': '"train.npz"'},
        of=PLAIN,
    ),
    "a misspelled variable": Mistake(
        "KeyError at train.py:3.*DATADIR", "DATA_DIR", script={'"DATA_DIR"': '"DATADIR"'}, of=PLAIN
    ),
    "a package that is not there": Mistake(
        "No module named 'pandas_'",
        "pip install|requirements",
        script={"import os\n": "import pandas_\nimport os\n"},
        of=PLAIN,
    ),
    "Horovod's import": Mistake(
        "horovod",
        "import ddl",
        script={"import os\n": "import horovod.tensorflow as hvd\nimport os\n"},
        of=PLAIN,
    ),
    "memory that is not there": Mistake(
        "MemoryError at train.py:5",
        "batch|fewer ranks",
        script={"epochs =": "big = bytearray(1 << 60)\nepochs ="},
        of=PLAIN,
    ),
    "killed for its memory": Mistake(
        "SIGKILL.*memory",
        "batch|fewer ranks",
        script={"epochs =": "os.kill(os.getpid(), 9)\nepochs ="},
        of=PLAIN,
    ),
    "an argument that is missing": Mistake(
        "code 2.*the following arguments are required: --rate",
        "required",
        script={
            "epochs =": "import argparse\np = argparse.ArgumentParser()\n"
            "p.add_argument('--rate', required=True)\np.parse_args()\nepochs ="
        },
        of=PLAIN,
    ),
    "a number that is a word": Mistake(
        r"ValueError at train.py:5: .*'ten'",
        "train.py:5",
        script={'int(os.environ["PARAM_EPOCHS"])': 'int("ten")'},
        of=PLAIN,
    ),
    "waits for somebody to type": Mistake(
        "EOFError at train.py:5",
        "type|terminal",
        script={"epochs =": "input()\nepochs ="},
        of=PLAIN,
    ),
    "a download": Mistake(
        "train.py:5: URL fetch failure",
        "training_data_reference",
        script={
            "epochs =": "raise Exception('URL fetch failure on https://127.0.0.1/a: None')\n"
            "epochs ="
        },
        of=PLAIN,
    ),
    "writes beside the script of another host": Mistake(
        "PermissionError at train.py:5",
        "RESULT_DIR",
        script={
            "epochs =": "raise PermissionError(13, 'Permission denied', '/model.keras')\nepochs ="
        },
        of=PLAIN,
    ),
    "no room left": Mistake(
        "No space left|disk is full",
        "disk|room|[Ff]ree",
        script={"epochs =": "raise OSError(28, os.strerror(28))\nepochs ="},
        of=PLAIN,
    ),
    "TensorFlow 1 under TensorFlow 2": Mistake("get_variable", 'version: "1|below 2', of=TF1),
    "what TensorFlow 1 had in contrib": Mistake(
        "contrib",
        "Use|[Rr]eplace",
        {'"2.21"': '"1.13"'},
        {"import tensorflow as tf\n": "import tensorflow as tf\ntf.contrib.data.map_and_batch\n"},
        of=TF1,
    ),
    # --- found by transform
    "saves nothing": Mistake(
        "CheckpointMissing",
        "model.keras",
        ALONE,
        {'shutil.copy("trained.keras",': "("},
        of=TRAINED,
    ),
    "saves somewhere else": Mistake(
        "CheckpointMissing",
        "RESULT_DIR",
        ALONE,
        {'os.path.join(os.environ["RESULT_DIR"], "model.keras")': '"model.keras"'},
        of=TRAINED,
    ),
    "saves the weights alone": Mistake(
        "CheckpointMissing.*weights",
        "model.save|whole model",
        ALONE,
        {"model.keras": "model.weights.h5"},
        of=TRAINED,
    ),
    "an epoch that was not saved": Mistake(
        "CheckpointMissing.*7",
        "latest",
        ALONE | {"transform: {": "transform: {checkpoint: 7, "},
        of=TRAINED,
    ),
    "no such sample": Mistake(
        "tst.npz", "transform.sample", ALONE | {"sample: test.npz": "sample: tst.npz"}, of=TRAINED
    ),
    "a sample of other rows": Mistake(
        "wide.npy.*rows of shape",
        r"\[8\]",
        ALONE | {"sample: test.npz": "sample: wide.npy"},
        of=TRAINED,
    ),
    # --- found by evaluate
    "a metric that nobody measures": Mistake(
        "acuracy", "accuracy", ALONE | {"metric: accuracy": "metric: acuracy"}, of=TRAINED
    ),
    "a sample without labels": Mistake(
        "accuracy.*training batches",
        "label",
        {"sample: test.npz": "sample: test.npy"},
    ),
    "not good enough": Mistake(
        "QualityTooLow.*below the minimum 2",
        "minimum|published",
        ALONE | {"minimum: 0.0": "minimum: 2.0"},
        of=TRAINED,
    ),
    "an evaluation that writes nothing": Mistake(
        r"wrote no \$EVALUATION",
        "Write ",
        ALONE | {"evaluation: {": "evaluation: {command: python measure.py, "},
        of=TRAINED,
        beside={"measure.py": "print('accuracy 0.9')\n"},
    ),
}


def changed(text: str, by: Mapping[str, str]) -> str:
    for old, new in by.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(7)
    rows = rng.normal(size=(64, 8)).astype(np.float32)
    labels = rng.integers(0, 4, 64)
    np.savez(folder / "train.npz", x=rows, y=labels)
    np.savez(folder / "test.npz", x=rows[:16], y=labels[:16])
    np.save(folder / "test.npy", rows[:16])
    np.save(folder / "wide.npy", np.tile(rows[:16], 3))


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The model that the script trains, alone."""
    folder = tmp_path_factory.mktemp("trained")
    write_data(folder / "data")
    env = {"DATA_DIR": str(folder / "data"), "RESULT_DIR": str(folder), "PARAM_EPOCHS": "1"}
    subprocess.run([RANKS_PYTHON, "-c", SCRIPT], env=os.environ | env, check=True)
    return folder / "model.keras"


@pytest.fixture
def road(workspace, context_of, tmp_path, request) -> Callable[[Mistake], str]:
    """road(mistake) -> the first line of what ends the road; empty if nothing does."""

    def go(mistake: Mistake) -> str:
        folder = tmp_path / "digits"
        write_data(folder / "data")
        (folder / "train.py").write_text(changed(mistake.of, mistake.script))
        if mistake.of is TRAINED:
            shutil.copy(request.getfixturevalue("trained"), folder / "trained.keras")
        for name, text in mistake.beside.items():
            (folder / name).write_text(text)
        path = folder / "manifest.yml"
        path.write_text(changed(MANIFEST, mistake.manifest))
        try:
            dag = dag_from(load_manifest(path), path)
        except DdlError as error:
            return str(error).splitlines()[0]
        context = context_of(dag.dag_id)
        context["params"] = {name: dag.params[name] for name in dag.params}
        for task in dag.topological_sort():
            try:
                task.render_template_fields(context)
                task.execute(context)
            except AirflowException as error:
                return str(error).splitlines()[0]
        return ""

    return go


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_its_cause_and_cure(road, name):
    mistake = MISTAKES[name]
    if mistake.cure == "not valid Python" and sys.executable != RANKS_PYTHON:
        pytest.skip("the ranks have another Python, and only that one knows its syntax")
    said = road(mistake)
    assert re.search(mistake.cause, said)
    assert re.search(mistake.cure, said)


def test_without_a_mistake_it_trains_and_publishes(road, tmp_path):
    assert road(Mistake("", "")) == ""
    (pointer,) = (tmp_path / "digits" / "results").glob("*/production.json")

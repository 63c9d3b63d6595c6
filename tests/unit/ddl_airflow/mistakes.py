"""Failures to plant, each in a manifest and a script that work, and what is to be said of them.

Most are mistakes that authors make; the others happen to those who made none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

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
        cause: regular expression that the first line of what ends the road must match, and the one
            line of the page and of the command line.
        cure: that must be in the same on the log, and on the page; empty: only its author knows.
        manifest, script: what is replaced in them by what.
        beside: further files beside the manifest, by name; folders with a slash at the end.
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
        "manifest.yml:3: model_definition.name: is given twice",
        "Keep one",
        {"  name: digits\n": "  name: digits\n  name: numbers\n"},
    ),
    "the bounds exclude the default": Mistake(
        "parameters.epochs.default: is 20, beyond the maximum 10",
        "Choose a default",
        {"default: 1,": "default: 20,"},
    ),
    "a parameter that is not there": Mistake(
        "params.epoch }} is not among the parameters",
        "Did you mean epochs",
        {COMMAND: COMMAND + " {{ params.epoch }}"},
    ),
    "four fields of cron": Mistake(
        "schedule: '0 3 \\* \\*' is not a cron expression",
        "0 3 \\* \\* 0",
        {"transform:": 'schedule: "0 3 * *"\ntransform:'},
    ),
    "a regular expression without a group": Mistake(
        r"metrics\[0\].regex: has 0 groups",
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
        r"train.py:1: .*(never closed|invalid syntax)",
        "not valid Python",
        script={"import os\n": "import (os\n"},
    ),
    "a misspelled python": Mistake("'pythom'", "python", {COMMAND: "command: pythom train.py"}),
    "no such folder of data": Mistake("dta: No such file", "correct the path", {"./data": "./dta"}),
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
    "no ddl at all": Mistake("trained apart.*did not import ddl", "Write `import ddl`", of=PLAIN),
    "an optimizer as it was loaded": Mistake(
        "'sgd' does not average gradients over the ranks",
        "model.compile",
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
        "train.py:15: .*rank 1 averages gradients, rank 0 is at the end of epoch 1",
        "steps_per_epoch",
        script={FIT: f"x, y = (x, y) if ddl.rank() else (x[:8], y[:8])\n{FIT}"},
    ),
    "each rank stops by its own loss": Mistake(
        r"rank \d averages gradients, rank \d is at the end of fit",
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
        "different models: sequential/dense/kernel is ",
        "same layers, in the same order, on all ranks",
        script={"Dense(4,": "Dense(4 if ddl.rank() else 5,"},
    ),
    "rank 0 averages alone": Mistake(
        "AllReduce.*rank 1 has already ended its script",
        "all ranks",
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
    "a part of Horovod that is not here": Mistake(
        "has no horovod.data",
        "tf.data",
        script={"import os\n": "import horovod.data\nimport os\n"},
        of=PLAIN,
    ),
    "a module of Horovod that is not here": Mistake(
        "No module named 'horovod.tensorflow.data'",
        "coming-from-horovod.md",
        script={"import os\n": "import horovod.tensorflow.data\nimport os\n"},
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
    "a command that is not there": Mistake(
        "command not found .no-such-trainer",
        "",
        {COMMAND: "command: no-such-trainer train.py"},
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
    "TensorFlow 1 under TensorFlow 2": Mistake(
        "no attribute 'get_variable'", 'version: "1', ALONE, of=TF1
    ),
    "what TensorFlow 1 had in contrib": Mistake(
        "tensorflow.contrib.data is gone",
        "Use tf.data",
        ALONE | {'"2.21"': '"1.13"'},
        {"import tensorflow as tf\n": "import tensorflow as tf\ntf.contrib.data.map_and_batch\n"},
        of=TF1,
    ),
    # --- found by transform
    "saves nothing": Mistake(
        "no checkpoint; found nothing",
        "model.keras",
        ALONE,
        {'shutil.copy("trained.keras",': "("},
        of=TRAINED,
    ),
    "saves the weights alone": Mistake(
        "weights .* without the model",
        "model.save|whole model",
        ALONE,
        {"model.keras": "model.weights.h5"},
        of=TRAINED,
    ),
    "an epoch that was not saved": Mistake(
        "no checkpoint at step 7",
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
        "nobody measured 'acuracy'",
        "There is: accuracy",
        ALONE | {"metric: accuracy": "metric: acuracy"},
        of=TRAINED,
    ),
    "a sample without labels": Mistake(
        "accuracy.*training batches",
        "label",
        ALONE | {"sample: test.npz": "sample: test.npy"},
        {
            "import shutil\n": "import shutil\nfrom ddl_ops import progress\n"
            "progress.append({'step': 1, 'accuracy': 0.5}, source='keras')\n"
        },
        of=TRAINED,
    ),
    "not good enough": Mistake(
        "accuracy is 0.*below the minimum 2",
        "evaluation.minimum",
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
# More of them, and what happens to those who made none: the suite has no time for these.
LONG = {
    # --- found by stage-data
    "data that nobody has put there": Mistake(
        "empty.*holds no objects", "Upload|correct", {"./data": "./empty"}, beside={"empty/": ""}
    ),
    "results go to a file": Mistake(
        "train.py is no folder", "Move|another place", {"{path: ./results}": "{path: ./train.py}"}
    ),
    "no such Python": Mistake(
        "/nowhere/python",
        "Install|[Cc]orrect|[Ss]et|launcher.python",
        {"parameters:": "launcher: {kind: local, python: /nowhere/python}\nparameters:"},
    ),
    # --- found by train
    "one rank of two fails": Mistake(
        r"rank 1 of 2 .*ValueError at train.py:5: sample 17 has 783 pixels",
        "",
        script={
            "epochs =": "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': "
            "raise ValueError('sample 17 has 783 pixels')\n__import__('time').sleep(60)\nepochs ="
        },
        of=PLAIN,
    ),
    "a fault in native code": Mistake(
        r"rank \d of 2 .*SIGSEGV",
        "",
        script={"epochs =": "os.kill(os.getpid(), 11)\nepochs ="},
        of=PLAIN,
    ),
    "ended by another program": Mistake(
        r"rank \d of 2 .*SIGTERM|rank \d of 2 .*143",
        "",
        script={"epochs =": "os.kill(os.getpid(), 15)\nepochs ="},
        of=PLAIN,
    ),
    "gives up with a word": Mistake(
        "no labels in the data",
        "",
        script={"epochs =": "import sys\nsys.exit('no labels in the data')\nepochs ="},
        of=PLAIN,
    ),
    "gives up without one": Mistake(
        "rank . of 2 .* exited with code 3",
        "",
        script={"epochs =": "import sys\nsys.exit(3)\nepochs ="},
        of=PLAIN,
    ),
    "data that were cut off": Mistake(
        "BadZipFile at train.py:6",
        "",
        script={"epochs =": "import io, zipfile\nzipfile.ZipFile(io.BytesIO(data[:99]))\nepochs ="},
        of=PLAIN,
    ),
    "a module of its own that is not there": Mistake(
        "No module named 'layers_'",
        "",
        script={"import os\n": "import os\nimport layers_\n"},
        of=PLAIN,
    ),
    # --- found by the steps after it
    "a second command that fails": Mistake(
        "export.py:1.*no such layer",
        "",
        ALONE | {COMMAND: COMMAND + " ; python export.py"},
        of=TRAINED,
        beside={"export.py": "raise ValueError('no such layer')\n"},
    ),
    "a model that was cut off": Mistake(
        "model.keras",
        "",
        ALONE,
        {"import shutil\n": "import shutil\nos.truncate('trained.keras', 999)\n"},
        of=TRAINED,
    ),
    "an evaluation that fails": Mistake(
        "ValueError at measure.py:1: no test set",
        "",
        ALONE | {"evaluation: {": "evaluation: {command: python measure.py, "},
        of=TRAINED,
        beside={"measure.py": "raise ValueError('no test set')\n"},
    ),
    "a model that is gone before it is published": Mistake(
        "there is no SavedModel",
        "transform",
        ALONE | {"evaluation: {": "evaluation: {command: python measure.py, "},
        of=TRAINED,
        beside={
            "measure.py": "import json, os\n"
            "os.remove(os.environ['RESULT_DIR'] + '/model/saved_model.pb')\n"
            "json.dump({'accuracy': 1.0}, open(os.environ['EVALUATION'], 'w'))\n"
        },
    ),
    # --- found when a wait has come to its limit
    "a rank that does not come": Mistake(
        "[Rr]ank 1 did not come within 3.0 s",
        "DDL_STALL_TIMEOUT",
        script={
            "import os\n": "import os, time\nos.environ['DDL_STALL_TIMEOUT'] = '3'\n",
            FIT: f"ddl.rank() and time.sleep(60)\n{FIT}",
        },
    ),
    "nobody answers at the store": Mistake(
        "Could not connect to the endpoint URL.*127.0.0.1:9",
        "Check that the service runs",
        {
            DATA: DATA_IN_BUCKET.format(
                "{endpoint_url: 'http://127.0.0.1:9', access_key_id: k, secret_access_key: s}"
            )
        },
    ),
    "a host that nobody knows": Mistake(
        "nobody.invalid: its name is not known",
        "Correct it, or DNS",
        ALONE | {"parameters:": "launcher: {kind: ssh, hosts: ['nobody.invalid:2']}\nparameters:"},
        of=PLAIN,
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

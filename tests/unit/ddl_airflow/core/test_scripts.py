"""What the text of scripts says of how their ranks will train."""

from __future__ import annotations

import os

import pytest

from ddl_airflow.core import scripts
from ddl_airflow.core.scripts import of_torch, will_train_apart

WORDS = "no .py file of the code folder mentions ddl: the 2 ranks will train apart, each a model"


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("import tensorflow", True),
        ("import ddlib; from addl import x; ddl_tools = 1", True),
        ("import ddl", False),
        ("from ddl.keras import DistributedOptimizer", False),
        ("import tensorflow.contrib.mpi_collectives as mpi", False),
        ("import ml_comm as mc", False),
        ("import horovod.tensorflow.keras as hvd", False),
        ("ops = tf.load_op_library('/opt/ddl_MDR.so')", False),
        ("# -*- coding: latin-1 -*-\n# caf\u00e9: import ddl", False),
    ],
)
def test_scripts_without_a_word_of_ours_will_train_apart(tmp_path, text, apart):
    (tmp_path / "lib").mkdir()
    (tmp_path / "train.py").write_text("import lib.model\n")
    (tmp_path / "lib" / "model.py").write_bytes(text.encode("latin-1"))
    assert will_train_apart(tmp_path, "mpi", 2).startswith(WORDS if apart else "")
    assert bool(will_train_apart(tmp_path, "mpi", 2)) is apart
    assert will_train_apart(tmp_path, "mpi", 1) == ""
    assert will_train_apart(tmp_path, "independent", 2) == ""
    assert will_train_apart(tmp_path, "parameter_server", 4) == ""


def test_nothing_is_said_of_what_cannot_be_seen(tmp_path, monkeypatch):
    assert will_train_apart(tmp_path / "none", "mpi", 2) == ""
    (tmp_path / "run.sh").write_text("python -m installed.package")
    assert will_train_apart(tmp_path, "mpi", 2) == ""
    (tmp_path / "a.py").write_text("pass")
    assert will_train_apart(tmp_path, "mpi", 2)
    for make in (
        lambda path: path.symlink_to("/dev/zero"),
        os.mkfifo,
        lambda path: path.write_text("x" * (2**20 + 1)),
    ):
        path = tmp_path / "odd.py"
        make(path)
        assert will_train_apart(tmp_path, "mpi", 2) == ""
        path.unlink()
    (tmp_path / "odd.py").mkdir()  # a folder of that name
    (tmp_path / "loop").symlink_to(tmp_path)
    assert will_train_apart(tmp_path, "mpi", 2)
    monkeypatch.setattr(scripts, "_MOST_FILES", 0)
    assert will_train_apart(tmp_path, "mpi", 2) == ""


@pytest.mark.parametrize(
    ("text", "also", "is_torch"),
    [
        ("import torch\n", "", True),
        ("from torch import nn", "", True),
        ("try:\n    import horovod.torch as hvd\nexcept ImportError:\n    pass", "", True),
        ("import torch\nimport tensorflow as tf", "", False),
        ("import torch", "from keras import layers", False),
        ("import torch", "import os, tensorflow as tf", False),
        ("import torch; import tensorflow as tf", "", False),
        ("import torch", "import horovod.tensorflow as hvd", False),
        ("import torch", "import tensorflow_datasets as tfds", False),
        ("import torch", "import tf_slim as slim", False),
        ("import torch", "import mpi_collectives as mpi", False),
        ("import torch", "ops = load('/opt/ddl_MDR.so')", False),
        ('"""Takes arrays\nfrom torch to numpy."""', "", False),
        ("from torch.nn import functional", "", True),
        ("from torchlight import x", "", False),
        ("import torchlight", "", False),
        ("print('import torch')", "", False),
        ("", "", False),
    ],
)
def test_scripts_of_torch_alone_are_told(tmp_path, text, also, is_torch):
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "model.py").write_text(also)
    said = of_torch(tmp_path, "mpi", 2)
    assert said.startswith("train.py imports torch, and no .py file ") if is_torch else not said
    assert of_torch(tmp_path, "independent", 2) == of_torch(tmp_path, "mpi", 1) == ""
    (tmp_path / "huge.py").write_text("x" * (2**20 + 1))
    assert of_torch(tmp_path, "mpi", 2) == ""  # it may be one of TensorFlow

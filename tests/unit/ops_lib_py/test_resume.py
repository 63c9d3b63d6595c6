"""What a training that goes on finds: real checkpoints, damaged in each way that was seen."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddl_ops import resume


@pytest.fixture(scope="module")
def tf() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow

    return tensorflow


@pytest.fixture(scope="module")
def saved(tf, tmp_path_factory) -> Path:
    """Checkpoints m-9 and m-10 of a Saver: numbers, text, a truth, parts and halves."""
    v1 = tf.compat.v1
    folder = tmp_path_factory.mktemp("saved")
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("weights", [1000])
        v1.get_variable("parts", [10, 10], partitioner=v1.fixed_size_partitioner(3))
        v1.get_variable("text", initializer=tf.constant(["x", "yy"]))
        v1.get_variable("halves", initializer=tf.ones([10], tf.bfloat16))
        v1.get_variable("truth", initializer=tf.constant(True))
        saver = v1.train.Saver(save_relative_paths=True)
        session.run(v1.global_variables_initializer())
        for step in (9, 10):
            saver.save(session, str(folder / "m"), global_step=step)
            os.utime(folder / f"m-{step}.index", (1000, 1000))  # one instant: the number decides
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "result")


def cut(path: Path, share: float) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DATA, INDEX = "m-10.data-00000-of-00001", "m-10.index"


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: cut(f / DATA, 0.5),
        lambda f: cut(f / DATA, 0),
        lambda f: flip(f / DATA, 500),
        lambda f: (f / DATA).unlink(),
        lambda f: cut(f / INDEX, 0.5),
        lambda f: cut(f / INDEX, 0),
        lambda f: flip(f / INDEX, 40),
    ],
    ids=["data cut", "data empty", "data changed", "data gone", *("cut", "empty", "changed")],
)
def test_a_damaged_checkpoint_makes_way_for_the_one_before(tf, folder, tmp_path, damage):
    damage(folder)
    there = {path.name for path in folder.glob("m-10*")}
    os.utime(folder / INDEX, (1000, 1000))
    damaged, whole, note = resume.leave_whole([folder], tmp_path / "aside")
    assert damaged.startswith("m-10 is damaged or half written (")
    assert "{{" not in damaged and "\n" not in damaged
    assert whole == "m-9 is the newest complete one to go on from"
    assert note.endswith("and now names m-9")
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / "m-9")
    assert not list(folder.glob("m-10*"))
    assert {path.name for path in (tmp_path / "aside").iterdir()} == there
    # The folder may be moved, and what is whole stays as it is.
    moved = folder.rename(tmp_path / "moved")
    assert tf.train.latest_checkpoint(str(moved)) == str(moved / "m-9")
    assert resume.leave_whole([moved], tmp_path / "aside") == [whole]


@pytest.mark.parametrize("note", ["", "model_check", 'model_checkpoint_path: "m-11"\n'])
def test_a_note_that_names_nothing_is_written_anew(tf, folder, tmp_path, note):
    (folder / "checkpoint").write_text(note)
    resume.leave_whole([folder], tmp_path / "aside")
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / "m-10")
    assert not (tmp_path / "aside").exists()


def test_without_a_complete_one_the_training_begins_anew(tf, folder, tmp_path):
    for path in folder.glob("*.data-*"):
        cut(path, 0.5)
    *_, none, note = resume.leave_whole([folder], tmp_path / "aside")
    assert none == "no complete one is left of m-10 and those before"
    assert "names what is not there" in note
    assert tf.train.latest_checkpoint(str(folder)) is None
    assert list(folder.iterdir()) == []


def keras_file(path: Path, written: int) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", path.name * 100)
    os.utime(path, (written, written))
    return path


def test_keras_files_by_family_and_by_time(tmp_path):
    import h5py

    folder = tmp_path / "result"
    (folder / "checkpoints").mkdir(parents=True)
    keras_file(folder / "checkpoints" / "model-10.keras", 1000)
    older = keras_file(folder / "checkpoints" / "model-9.keras", 1000)
    cut(older, 0.5)  # and not read
    os.utime(older, (1000, 1000))
    newest = keras_file(folder / "checkpoints" / "model-2.keras", 2000)
    flip(newest, 60)
    os.utime(newest, (2000, 2000))
    keras_file(folder / "model.keras", 500)
    keras_file(folder / ".partial.keras", 3000).write_bytes(b"")
    for number in (1, 2):
        with h5py.File(folder / f"epoch-{number}.weights.h5", "w") as file:
            file["w"] = list(range(5000))
    cut(folder / "epoch-2.weights.h5", 0.7)
    said = resume.leave_whole([folder, tmp_path / "absent"], tmp_path / "aside")
    assert [sentence.split(" (")[0] for sentence in said] == [
        "model-2.keras is damaged or half written",
        "model-10.keras is the newest complete one to go on from",
        "epoch-2.weights.h5 is damaged or half written",
        "epoch-1.weights.h5 is the newest complete one to go on from",
        "model.keras is the newest complete one to go on from",
    ]
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == [
        "epoch-2.weights.h5",
        "model-2.keras",
    ]


@pytest.mark.parametrize("damaged", ["latest.weights.h5", "training_metadata.json"])
@pytest.mark.parametrize("before", [True, False])
def test_what_keras_backs_up_is_one_checkpoint(tmp_path, damaged, before):
    """Keras would train only the last epochs, on new weights, where it found no weights there."""
    keras = pytest.importorskip("keras")

    class Killed(Exception):
        pass

    class Ends(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 3:
                raise Killed

    def fit(*callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input([2]), keras.layers.Dense(200)])
        model.compile("sgd", "mse")
        kept = keras.callbacks.BackupAndRestore(folder, double_checkpoint=before)
        model.fit(ones[:, :2], ones, epochs=4, verbose=0, callbacks=[kept, *callbacks])
        return model.get_weights(), model.history.epoch

    ones = np.ones([1, 200])
    folder = tmp_path / "result" / "backup"
    expected, _ = fit()
    with pytest.raises(Killed):
        fit(Ends())
    cut(folder / damaged, 0.5)
    resume.leave_whole([tmp_path / "result"], tmp_path / "aside")
    weights, epochs = fit()
    assert epochs == ([2, 3] if before else [0, 1, 2, 3])
    for one, other in zip(weights, expected, strict=True):
        assert abs(one - other).max() < 1e-6


def test_a_link_to_a_checkpoint_that_is_gone_is_none(tf, folder, tmp_path):
    """As of a script that keeps the last three, and a link to the best one."""
    keras_file(folder / "epoch-9.keras", 900)
    (folder / "best.keras").symlink_to("epoch-1.keras")
    (folder / "best.index").symlink_to("m-1.index")
    (folder / "best.h5").symlink_to("best.h5")
    (folder / "kept.keras").mkdir()
    (folder / "checkpoint").write_text("")
    *whole, note = resume.leave_whole([folder], tmp_path / "aside")
    assert whole == [
        "epoch-9.keras is the newest complete one to go on from",
        "m-10 is the newest complete one to go on from",
    ]
    assert note.endswith("and now names m-10")
    assert not (tmp_path / "aside").exists()
    # Gone only now: what it leads to is damaged, and was moved before.
    (folder / "last.keras").symlink_to("epoch-9.keras")
    cut(folder / "epoch-9.keras", 0.5)
    said = resume.leave_whole([folder], tmp_path / "aside")
    assert "no complete one is left of last.keras and those before" in said
    assert [path.name for path in (tmp_path / "aside").iterdir()] == ["epoch-9.keras"]


def test_what_is_served_is_no_checkpoint(tmp_path):
    variables = tmp_path / "result" / "model" / "variables"
    variables.mkdir(parents=True)
    (variables.parent / "saved_model.pb").touch()
    (variables / "variables.index").touch()
    assert resume.leave_whole([tmp_path / "result"], tmp_path / "aside") == []


def test_command_says_what_it_did(tmp_path, capsys):
    keras_file(tmp_path / "model-1.keras", 1000)
    assert resume.main(["--aside", str(tmp_path / "aside"), str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "checkpoints: model-1.keras is the newest complete one to go on from\n"
    )

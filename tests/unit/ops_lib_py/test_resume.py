"""What a training that goes on finds: real checkpoints, damaged in each way that was seen."""

from __future__ import annotations

import errno
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


def copied(folder: Path, name: str, written: int = 500) -> Path:
    """m-9 under another name, as if it had been saved under that."""
    for path in folder.glob("m-9.*"):
        shutil.copy(path, folder / path.name.replace("m-9", name, 1))
    index = folder / f"{name}.index"
    os.utime(index, (written, written))
    return index


def goes_on(tf, graph: Path, folder: Path, keep: int, steps: tuple[int, ...]) -> None:
    """As TensorFlow 1's sessions and Estimators: restores what is noted, and saves."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        v1.train.import_meta_graph(str(graph))
        saver = v1.train.Saver(max_to_keep=keep)
        session, restored = v1.train.SessionManager().recover_session(
            "", saver=saver, checkpoint_dir=str(folder)
        )
        with session:
            assert restored
            for step in steps:
                saver.save(session, str(folder / "m"), global_step=step)


def steps_in(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.index"))


def test_a_saver_that_goes_on_removes_no_others(tf, saved, folder, tmp_path):
    """Neither milestones (keep_checkpoint_every_n_hours) nor a second Saver's best."""
    copied(folder, "m-5")
    copied(folder, "best-90", 2000)
    flip(folder / DATA, 500)
    os.utime(folder / INDEX, (1000, 1000))
    note = resume.leave_whole([folder], tmp_path / "aside")[-1]
    assert note.endswith("and now names m-9")
    goes_on(tf, saved / "m-9.meta", folder, 2, (11, 12, 13, 14))
    assert steps_in(folder) == ["best-90", "m-13", "m-14", "m-5"]


def test_a_milestone_that_is_gone_on_from_stays(tf, saved, folder, tmp_path):
    copied(folder, "m-5")
    copied(folder, "best-90", 2000)
    goes_on(tf, saved / "m-9.meta", folder, 2, (11, 12))  # and m-9 and m-10 are removed
    for path in folder.glob("m-1[12].data-*"):
        cut(path, 0.5)
    resume.leave_whole([folder], tmp_path / "aside")
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / "m-5")
    goes_on(tf, saved / "m-9.meta", folder, 1, (21, 22))
    assert steps_in(folder) == ["best-90", "m-22", "m-5"]


def test_another_family_is_not_gone_on_from(tf, folder, tmp_path):
    copied(folder, "best-90", 2000)
    for path in folder.glob("m-*.data-*"):
        cut(path, 0.5)
    note = resume.leave_whole([folder], tmp_path / "aside")[-1]
    assert "names what is not there: now in" in note
    assert tf.train.latest_checkpoint(str(folder)) is None
    assert steps_in(folder) == ["best-90"]


def test_a_note_that_cannot_be_read_beside_links_to_nothing_goes(tf, folder, tmp_path):
    kept = tmp_path / "result" / "kept"
    kept.mkdir()
    (kept / "last.index").symlink_to("../m-10.index")
    (kept / "checkpoint").write_text("")
    cut(folder / DATA, 0.5)
    resume.leave_whole([folder], tmp_path / "aside")
    assert tf.train.latest_checkpoint(str(kept)) is None
    assert not (kept / "checkpoint").exists()


def test_where_numbers_are_in_the_names_the_noted_one_decides(tf, folder, tmp_path):
    """fold1 is read, though the newest of what is called alike is of fold2, and whole."""
    saver = tf.compat.v1.train
    for fold, step in ((1, 70), (1, 80), (1, 90), (2, 85)):
        copied(folder, f"fold{fold}-{step}", 1000 + step)
    names = [f"fold1-{step}" for step in (70, 80, 90)]
    saver.update_checkpoint_state(str(folder), names[-1], all_model_checkpoint_paths=names)
    for step in (80, 90):
        cut(folder / f"fold1-{step}.data-00000-of-00001", 0.5)
    resume.leave_whole([folder], tmp_path / "aside")
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / "fold1-70")
    noted = tf.train.get_checkpoint_state(str(folder))
    assert list(noted.all_model_checkpoint_paths) == [str(folder / "fold1-70")]


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        (["first", "second", "last"], ["first", "second", "last"]),  # of one Saver
        (["epoch1-1", "epoch2-2", "epoch3-3"], ["epoch3-3"]),  # of tf.train.Checkpoint.save
    ],
)
def test_without_one_of_its_name_another_is_gone_on_from(tf, folder, tmp_path, names, listed):
    """What the note has beside it, and what is called like it but for numbers."""
    for written, name in enumerate(names):
        copied(folder, name, 2000 + written)
    copied(folder, "best-90", 3000)
    tf.compat.v1.train.update_checkpoint_state(
        str(folder), listed[-1], all_model_checkpoint_paths=listed
    )
    cut(folder / f"{names[-1]}.data-00000-of-00001", 0.5)
    resume.leave_whole([folder], tmp_path / "aside")
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / names[1])


@pytest.mark.parametrize("note", ["", "model_check"])
def test_without_a_note_that_can_be_read_one_family_is_listed(tf, folder, tmp_path, note):
    copied(folder, "best-90", 2000)
    cut(folder / DATA, 0.5)
    cut(keras_file(folder / "model-3.keras", 3000), 0.5)
    (folder / "checkpoint").write_text(note)
    resume.leave_whole([folder], tmp_path / "aside")
    noted = tf.train.get_checkpoint_state(str(folder))
    assert noted.model_checkpoint_path == str(folder / "m-9")
    assert list(noted.all_model_checkpoint_paths) == [str(folder / "m-9")]


def test_what_a_manager_keeps_by_time_is_kept(tf, tmp_path):
    """tf.train.CheckpointManager goes by times in the note: without them it removes nothing."""
    folder = tmp_path / "result"
    checkpoint = tf.train.Checkpoint(v=tf.Variable(1.0))

    def manager():
        return tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)

    first = manager()
    for _ in range(3):
        first.save()
    cut(folder / "ckpt-3.data-00000-of-00001", 0.5)
    before = tf.train.get_checkpoint_state(str(folder))
    resume.leave_whole([folder], tmp_path / "aside")
    after = tf.train.get_checkpoint_state(str(folder))
    assert after.last_preserved_timestamp == before.last_preserved_timestamp
    times = list(before.all_model_checkpoint_timestamps)
    assert list(after.all_model_checkpoint_timestamps) == times[:1]
    again = manager()
    checkpoint.restore(again.latest_checkpoint)
    for _ in range(2):
        again.save()
    assert steps_in(folder) == ["ckpt-3", "ckpt-4"]


def test_a_note_of_another_place_lists_what_is_here(tf, folder, tmp_path):
    """Of a folder that was moved since, by its whole path, as a Saver notes it by itself."""
    noted = [f"/elsewhere/m-{step}" for step in (8, 9, 10)]
    tf.compat.v1.train.update_checkpoint_state(
        str(folder), noted[-1], all_model_checkpoint_paths=noted
    )
    copied(folder, "m-5")
    resume.leave_whole([folder], tmp_path / "aside")
    after = tf.train.get_checkpoint_state(str(folder))
    assert after.model_checkpoint_path == str(folder / "m-10")
    assert list(after.all_model_checkpoint_paths) == [str(folder / f"m-{n}") for n in (9, 10)]


@pytest.mark.parametrize("name", [DATA, INDEX])
def test_what_cannot_be_read_now_is_not_damaged(folder, tmp_path, name):
    """An error of the file system, as NFS has some: reading this gives EIO."""
    (folder / name).unlink()
    (folder / name).symlink_to("/proc/self/mem")
    there = sorted(folder.iterdir())
    with pytest.raises(OSError, match="Input/output error"):
        resume.leave_whole([folder], tmp_path / "aside")
    assert sorted(folder.iterdir()) == there
    assert not (tmp_path / "aside").exists()


@pytest.mark.parametrize("kind", ["Aborted", "Unavailable", "DeadlineExceeded", "Unknown"])
def test_an_error_that_passes_is_not_damage(tf, folder, tmp_path, monkeypatch, kind):
    """ESTALE comes as the first, EAGAIN as the second, ETIMEDOUT as the third."""
    error = tf.errors.UnknownError if kind == "Unknown" else getattr(tf.errors, f"{kind}Error")

    def fails(**_):
        raise error(None, None, "Stale file handle")

    monkeypatch.setattr(tf.raw_ops, "RestoreV2", fails)
    with pytest.raises(OSError, match="m-10: cannot be read: Stale file handle"):
        resume.leave_whole([folder], tmp_path / "aside")
    assert not (tmp_path / "aside").exists()


@pytest.mark.parametrize("name", ["checkpoint", "folder"])
def test_a_note_or_a_folder_that_cannot_be_read_now_is_left(folder, tmp_path, monkeypatch, name):
    """TensorFlow says nothing of the first, and Path.glob() nothing of the second."""
    if name == "checkpoint":
        (folder / name).unlink()
        (folder / name).symlink_to("/proc/self/mem")
    else:
        listdir = os.listdir

        def stale(path="."):
            if Path(path) == folder:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return listdir(path)

        monkeypatch.setattr(os, "listdir", stale)
    with pytest.raises(OSError, match="Input/output error|Stale file handle"):
        resume.leave_whole([folder], tmp_path / "aside")
    assert not (tmp_path / "aside").exists()


def test_checkpoints_of_one_name_keep_their_folders(folder, tmp_path):
    """As of the two models of a GAN; and those of an earlier try stay, too."""
    result, aside = tmp_path / "both", tmp_path / "aside"

    def files() -> dict[str, bytes]:
        return {
            path.relative_to(aside).as_posix(): path.read_bytes()
            for path in aside.rglob("*")
            if path.is_file()
        }

    expected = {}
    for model in ("gen", "disc"):
        shutil.copytree(folder, result / model)
        flip(result / model / DATA, 500 if model == "gen" else 600)
        expected[f"{model}/{DATA}"] = (result / model / DATA).read_bytes()
    said = resume.leave_whole([result], aside)
    assert any(f"now in {aside / 'gen'}" in sentence for sentence in said)
    once = files()
    assert expected.items() <= once.items()
    assert {f"{model}/m-10.meta" for model in ("gen", "disc")} <= once.keys()
    for number in (2, 3):  # the training goes on, and is killed as it saves
        shutil.copy(folder / INDEX, result / "gen" / INDEX)
        (result / "gen" / DATA).write_bytes(bytes([number]) * 100)
        said = resume.leave_whole([result], aside)
        assert any(f"now in {aside / str(number) / 'gen'}" in sentence for sentence in said)
        once |= {
            f"{number}/gen/{DATA}": bytes([number]) * 100,
            f"{number}/gen/{INDEX}": (folder / INDEX).read_bytes(),
        }
        assert files() == once


def test_what_is_aside_in_the_folder_itself_stays_there(folder, tmp_path):
    """By hand: python -m ddl_ops.resume --aside damaged ."""
    flip(folder / DATA, 500)
    resume.leave_whole([folder], folder / "damaged")
    assert resume.leave_whole([folder], folder / "damaged") == [
        "m-9 is the newest complete one to go on from"
    ]
    assert (folder / "damaged" / INDEX).exists()


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
    aside = tmp_path / "aside"
    assert sorted(path.relative_to(aside).as_posix() for path in aside.rglob("*.*")) == [
        "checkpoints/model-2.keras",
        "epoch-2.weights.h5",
    ]


def test_files_of_keras_2_are_read(tmp_path):
    """As of ModelCheckpoint("w.{epoch:02d}-{val_loss:.2f}.hdf5")."""
    import h5py

    for number in (1, 2):
        path = tmp_path / f"w.0{number}-0.3{number}.hdf5"
        with h5py.File(path, "w") as file:
            file["w"] = list(range(5000))
        os.utime(path, (number, number))
    cut(path, 0.7)
    damaged, whole = resume.leave_whole([tmp_path], tmp_path / "aside")
    assert damaged.startswith("w.02-0.32.hdf5 is damaged or half written (")
    assert whole == "w.01-0.31.hdf5 is the newest complete one to go on from"
    assert [path.name for path in (tmp_path / "aside").iterdir()] == ["w.02-0.32.hdf5"]


def test_files_that_differ_by_the_number_of_their_model_are_families(tmp_path):
    keras_file(tmp_path / "fold1-model-1.keras", 1000)
    cut(keras_file(tmp_path / "fold1-model-2.keras", 2000), 0.5)
    keras_file(tmp_path / "fold2-model-1.keras", 3000)
    keras_file(tmp_path / "model.01-0.31.keras", 4000)
    cut(keras_file(tmp_path / "model.02-0.16.keras", 5000), 0.5)
    said = resume.leave_whole([tmp_path], tmp_path / "aside")
    assert [sentence.split(" (")[0] for sentence in said] == [
        "fold1-model-2.keras is damaged or half written",
        "fold1-model-1.keras is the newest complete one to go on from",
        "fold2-model-1.keras is the newest complete one to go on from",
        "model.02-0.16.keras is damaged or half written",
        "model.01-0.31.keras is the newest complete one to go on from",
    ]


@pytest.mark.parametrize("damaged", ["model.npz", "rank-1.npz"])
def test_a_place_in_an_epoch_that_is_damaged_is_moved(tmp_path, damaged):
    for step in (9, 10):
        place = tmp_path / "checkpoints" / f"preempted-{step}"
        place.mkdir(parents=True)
        for name in ("model.npz", "rank-0.npz", "rank-1.npz"):
            np.savez(place / name, a=np.arange(5000))
    flip(place / damaged, 500)
    moved, whole = resume.leave_whole([tmp_path], tmp_path / "aside")
    assert moved.startswith(f"preempted-10 is damaged or half written ({damaged}: ")
    assert moved.endswith(f"now in {tmp_path / 'aside' / 'checkpoints'}")
    assert whole == "preempted-9 is the newest complete one to go on from"
    assert os.listdir(tmp_path / "checkpoints") == ["preempted-9"]
    assert len(list((tmp_path / "aside" / "checkpoints" / "preempted-10").iterdir())) == 3
    assert resume.leave_whole([tmp_path], tmp_path / "aside") == [whole]


@pytest.mark.parametrize(
    "name", ["ckpt-{}-1000", "Epoch{}_step100", "2026-11-2{}_1523_model-1", "w_ep{}-val_0.53"]
)
def test_numbers_that_count_make_no_families(tmp_path, name):
    """Each would be read before each start, however many there are."""
    for number in range(1, 4):
        keras_file(tmp_path / f"{name.format(number)}.keras", 1000 * number)
    said = resume.leave_whole([tmp_path], tmp_path / "aside")
    newest = f"{name.format(3)}.keras is the newest complete one to go on from"
    assert [sentence.split(" (")[0] for sentence in said] == [newest]


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

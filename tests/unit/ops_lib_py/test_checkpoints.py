"""What is found in a results folder, from file names alone."""

from __future__ import annotations

import contextlib
import errno
import os
import zipfile
from pathlib import Path

import pytest
from ddl_ops import checkpoints
from ddl_ops.checkpoints import CheckpointMissing, CheckpointUnreadable, TransformError


def touch(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def written(folder: Path, times: dict[str, int]) -> None:
    """Files of these names, written at these times."""
    touch(folder, *times)
    for name, at in times.items():
        os.utime(folder / name, (at, at))


def keras_file(path: Path, weights: bytes, written: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", weights)
    os.utime(path, (written, written))


@pytest.mark.parametrize("times", [(1000, 2000, 3000), (1000, 1000, 1000), (1002, 1001, 1000)])
def test_steps_are_ordered_as_numbers_newest_first(tmp_path, times):
    """By time; within two seconds, as where files were copied, by number."""
    touch(tmp_path, "m_basegraph.meta", "m-20.meta")
    written(tmp_path, dict(zip(("m-9.index", "m-20.index", "m-100.index"), times, strict=True)))
    found = checkpoints.find(tmp_path)
    assert found.base_graph == tmp_path / "m_basegraph.meta"
    assert [c.step for c in found.checkpoints] == [100, 20, 9]
    assert found.checkpoints[0].path == tmp_path / "m-100"
    assert found.steps == [9, 20, 100]


def test_the_last_checkpoint_may_have_no_number(tmp_path):
    touch(tmp_path, "m_basegraph.meta", "m.meta", "other.index")
    written(tmp_path, {"m.index": 2000})
    last = checkpoints.Checkpoint(tmp_path / "m", None)
    assert checkpoints.find(tmp_path).checkpoints == (last,)
    written(tmp_path, {"m-10.index": 1000})
    found = checkpoints.find(tmp_path)
    assert found.checkpoints == (last, checkpoints.Checkpoint(tmp_path / "m-10", 10))
    assert found.steps == [10]
    written(tmp_path, {"m-10.index": 1999})  # the last two were saved one after the other
    assert checkpoints.find(tmp_path).checkpoints[0] == last
    written(tmp_path, {"m-10.index": 3000})  # of a start, as for the graph beside it
    assert checkpoints.find(tmp_path).checkpoints[0].step == 10


def test_a_checkpoint_without_a_number_is_no_family_beside_those_with_one(tmp_path):
    touch(tmp_path, "base.meta", "m-4.index", "best.index")
    assert [c.step for c in checkpoints.find(tmp_path).checkpoints] == [4]
    (tmp_path / "m-4.index").unlink()
    assert checkpoints.find(tmp_path).checkpoints[0].path.name == "best"
    touch(tmp_path, "worst.index")
    with pytest.raises(TransformError, match="checkpoints of best, worst"):
        checkpoints.find(tmp_path)
    for name in ("best", "worst"):
        (tmp_path / f"{name}.index").unlink()
    touch(tmp_path, "base.index")  # by a Saver, with the graph of the training
    with pytest.raises(CheckpointMissing, match=r"base.meta is there, but no checkpoint"):
        checkpoints.find(tmp_path)


def test_a_retry_that_ends_at_a_lower_step_is_the_newest(tmp_path):
    """A try died at step 990; the next one began anew."""
    touch(tmp_path, "m_basegraph.meta")
    written(tmp_path, {"m-980.index": 980, "m-990.index": 990, "m-400.index": 2000})
    assert [c.step for c in checkpoints.find(tmp_path).checkpoints] == [400, 990, 980]


@pytest.mark.parametrize(
    ("noted", "times", "newest"),
    [
        ("m-100", {"m-100": 1000, "m-20": 1010, "m-90": 1020}, "m-100"),  # copied, by name
        ("m-40", {"m-20": 1000, "m-40": 1000, "m-90": 1000}, "m-40"),  # copied after a retry
        ("/elsewhere/m", {"m": 1000, "m-20": 1010}, "m"),
        (r"m\303\266-7", {"m\u00f6-7": 1000, "m\u00f6-20": 1000}, "m\u00f6-7"),
        ("m-20", {"m-20": 1000, "m-90": 2000}, "m-90"),  # saved without the note
        ("best-3", {"m-20": 1000, "m-90": 2000}, "m-90"),
        ("m-30", {"m-20": 1000, "m-90": 2000}, "m-90"),
        (None, {"m-20": 1000, "m-90": 2000}, "m-90"),
    ],
)
def test_the_one_that_tensorflow_has_noted_is_the_newest(tmp_path, noted, times, newest):
    """Unless another one is newer by its time and by its number."""
    touch(tmp_path, "base.meta")
    written(tmp_path, {f"{name}.index": at for name, at in times.items()})
    note(tmp_path, noted, min(times.values()) + 1)
    found = checkpoints.find(tmp_path)
    assert found.checkpoints[0].path.name == newest and found.doubted is None


def note(folder: Path, noted: str | None, at: int) -> None:
    """What a Saver notes in the file ``checkpoint``."""
    text = f'model_checkpoint_path: "{noted}"\nall_model_checkpoint_paths: "m-20"\n'
    (folder / "checkpoint").write_bytes(text.encode() if noted else b"\xff\0")
    os.utime(folder / "checkpoint", (at, at))


@pytest.mark.parametrize("at", [990, 1003, 1009])
def test_a_copy_does_not_put_a_higher_step_before_the_noted_one(tmp_path, at):
    """A try began anew; the file `checkpoint` was copied first, between them or last."""
    touch(tmp_path, "base.meta")
    written(tmp_path, {"m-200.index": 996, "m-300.index": 1000, "m-1000.index": 1006})
    note(tmp_path, "m-300", at)
    found = checkpoints.find(tmp_path)
    assert [c.step for c in found.checkpoints][0] == (1000 if at == 1003 else 300)
    assert found.doubted is None


@pytest.mark.parametrize(
    ("names", "newest"),
    [
        (["m-100", "m-1000", "m-200", "m-900"], "m-1000"),  # by name, as `cp *` copies
        (["m-900", "m-100", "m-1000", "m-200"], "m-1000"),  # as they lie in the folder
        (["m-100", "m", "m-1000", "m-200", "m-900"], "m"),  # the last one that a Saver saves
    ],
)
def test_the_times_of_a_copy_do_not_tell_which_is_the_newest(tmp_path, names, newest):
    touch(tmp_path, "base.meta")
    written(tmp_path, {f"{name}.index": 1000 + 5 * n for n, name in enumerate(names)})
    found = checkpoints.find(tmp_path)
    assert found.checkpoints[0].path.name == newest
    assert [c.step for c in found.checkpoints if c.step] == [1000, 900, 200, 100]
    assert found.doubted is not None and found.doubted.path.name == names[-1]
    note(tmp_path, "m-200", 1000)  # which tells
    found = checkpoints.find(tmp_path)
    assert found.checkpoints[0].step == 200 and found.doubted is None


def test_checkpoints_may_lie_in_their_own_folder(tmp_path):
    touch(tmp_path, "m_basegraph.meta", "checkpoints/m-4.index")
    (found,) = checkpoints.find(tmp_path).checkpoints
    assert found == checkpoints.Checkpoint(tmp_path / "checkpoints" / "m-4", 4)


def test_base_graph_may_be_called_base(tmp_path):
    touch(tmp_path, "base.meta", "m-4.index")
    assert checkpoints.find(tmp_path).base_graph == tmp_path / "base.meta"


def test_own_family_wins_over_another(tmp_path):
    touch(tmp_path, "m_basegraph.meta", "m-4.index", "other-9.index")
    assert [c.step for c in checkpoints.find(tmp_path).checkpoints] == [4]


def test_two_families_and_none_named_after_the_graph(tmp_path):
    touch(tmp_path, "base.meta", "m-4.index", "other-9.index")
    with pytest.raises(TransformError, match="checkpoints of m, other"):
        checkpoints.find(tmp_path)


@pytest.mark.parametrize("name", ["baseline", "base", "m"])
def test_the_graph_beside_a_checkpoint_is_no_base_graph(tmp_path, name):
    touch(tmp_path, *(f"{name}-{step}.{kind}" for step in (4, 9) for kind in ("meta", "index")))
    with pytest.raises(CheckpointMissing, match=r"checkpoints, but no base graph \*_basegraph"):
        checkpoints.find(tmp_path)
    touch(tmp_path, f"{name}_basegraph.meta")
    found = checkpoints.find(tmp_path)
    assert found.base_graph == tmp_path / f"{name}_basegraph.meta"
    assert found.steps == [4, 9]


@pytest.mark.parametrize(
    "names",
    [
        ["base_model.meta", "base_model.index"],  # by a Saver
        ["base_resnet-50.meta"],
        ["base-v1-2.meta", "m-4.meta"],
        ["base.meta", "base_model.meta", "base_model.index"],
    ],
)
def test_which_of_them_is_the_base_graph(tmp_path, names):
    touch(tmp_path, "m-4.index", *names)
    assert checkpoints.find(tmp_path).base_graph == tmp_path / names[0]


def test_what_is_left_of_a_checkpoint_is_no_base_graph(tmp_path):
    touch(tmp_path, "base-9.meta", "base-4.meta", "base-4.index")
    with pytest.raises(CheckpointMissing, match=r"checkpoints, but no base graph"):
        checkpoints.find(tmp_path)


def test_two_base_graphs(tmp_path):
    touch(tmp_path, "a_basegraph.meta", "b_basegraph.meta", "a-4.index")
    with pytest.raises(TransformError, match="2 base graphs .a_basegraph.meta, b_basegraph.meta"):
        checkpoints.find(tmp_path)


def test_newest_keras_file_is_by_time_not_by_number(tmp_path):
    keras_file(tmp_path / "checkpoints" / "model-10.keras", b"ten", 1000)
    keras_file(tmp_path / "checkpoints" / "model-9.keras", b"nine", 2000)
    found = checkpoints.find(tmp_path)
    assert found.base_graph is None
    assert [c.step for c in found.checkpoints] == [9, 10]


def test_final_keras_model_has_the_number_of_the_checkpoint_with_its_weights(tmp_path):
    keras_file(tmp_path / "checkpoints" / "model-1.keras", b"one", 1000)
    keras_file(tmp_path / "checkpoints" / "model-2.keras", b"two", 2000)
    keras_file(tmp_path / "model.keras", b"one", 3000)
    newest = checkpoints.find(tmp_path).checkpoints[0]
    assert newest == checkpoints.Checkpoint(tmp_path / "model.keras", 1)
    keras_file(tmp_path / "model.keras", b"tuned after that", 3000)
    assert checkpoints.find(tmp_path).checkpoints[0].step is None


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("model-03", 3),
        ("weights.05", 5),
        ("cnn_7", 7),
        ("12", 12),
        ("epoch10", 10),
        ("mnist-epoch10", 10),
        ("step=40", 40),
        ("best_ckpt3", 3),
        ("model.10-0.25", None),  # the decimals of a loss
        ("mobilenet_v2", None),
        ("resnet50", None),
        ("cifar100", None),
        ("model-v3", None),
    ],
)
def test_the_number_that_is_a_step(tmp_path, name, step):
    keras_file(tmp_path / f"{name}.keras", b"weights", 1000)
    (found,) = checkpoints.find(tmp_path).checkpoints
    assert found.step == step


@pytest.mark.parametrize(
    ("names", "models"),
    [
        (["generator", "discriminator"], ("discriminator", "generator")),
        (["generator-01", "generator-02", "discriminator-02"], ("discriminator", "generator")),
        (["generator_best", "critic.01-0.25"], ("critic", "generator")),
        (["model-01", "encoder"], ("encoder", "model")),
        (["mobilenet_v2", "mobilenet_v3"], ("mobilenet_v2", "mobilenet_v3")),
        (["resnet50-3", "resnet101-3"], ("resnet101", "resnet50")),
    ],
)
def test_keras_files_of_several_models(tmp_path, names, models):
    for number, name in enumerate(names):
        keras_file(tmp_path / "checkpoints" / f"{name}.keras", name.encode(), 1000 + number)
    assert checkpoints.find(tmp_path).models == models


@pytest.mark.parametrize(
    "names",
    [
        ["model-01", "model-02", "model"],
        ["best", "model-01", "model-02", "last"],
        ["model-best", "model_final", "latest", "epoch10", "epoch11"],
        ["best_model", "model.10-0.25", "model.11-0.20"],
        ["mnist-01", "mnist_model", "best_mnist_model", "Mnist-val_loss=0.25"],
        ["weights.05", "weights.06", "checkpoint-7", "mnist"],
        ["resnet50-1", "resnet50-2", "best"],
        ["1", "2", "final"],
    ],
)
def test_keras_files_of_one_model(tmp_path, names):
    for number, name in enumerate(names):
        keras_file(tmp_path / f"{name}.keras", name.encode(), 1000 + number)
    assert len(checkpoints.find(tmp_path).models) <= 1


def test_a_keras_file_of_the_same_weights_is_the_same_model(tmp_path):
    keras_file(tmp_path / "checkpoints" / "model-1.keras", b"one", 1000)
    keras_file(tmp_path / "checkpoints" / "model-2.keras", b"two", 2000)
    keras_file(tmp_path / "digits.keras", b"two", 3000)
    assert checkpoints.find(tmp_path).models == ("model",)


def names(paths) -> list[str]:
    return [path.name for path in paths]


def test_to_go_on_from_is_only_what_tells_its_epochs(tmp_path):
    assert checkpoints.newest_model(tmp_path) == (None, [])
    keras_file(tmp_path / "model-03.keras", b"three", 1000)  # as all releases name them
    keras_file(tmp_path / "model.04-0.16.keras", b"four", 2000)
    keras_file(tmp_path / "step-120.keras", b"and more", 3000)
    keras_file(tmp_path / "best.keras", b"best", 4000)
    found, passed_over = checkpoints.newest_model(tmp_path)
    assert found == checkpoints.Checkpoint(tmp_path / "model-03.keras", 3)
    assert names(passed_over) == ["step-120.keras", "model.04-0.16.keras"]
    for name, epochs in (("model.04-0.16.keras", 4), ("best.keras", 5), ("step-120.keras", 0)):
        checkpoints.note_epochs(tmp_path / name, epochs)
        os.utime(tmp_path / name, (5000 + epochs, 5000 + epochs))
    assert checkpoints.newest_model(tmp_path)[0].step == 5
    (tmp_path / "best.keras").unlink()
    assert checkpoints.newest_model(tmp_path)[0].step == 4


def test_a_link_to_a_model_that_is_gone_is_passed_over(tmp_path):
    keras_file(tmp_path / "model-1.keras", b"one", 1000)
    keras_file(tmp_path / "model-2.keras", b"two", 2000)
    (tmp_path / "newest.keras").symlink_to("model-2.keras")
    (tmp_path / "model-2.keras").unlink()
    found = checkpoints.Checkpoint(tmp_path / "model-1.keras", 1)
    assert checkpoints.newest_model(tmp_path) == (found, [])


def test_noted_epochs_come_before_the_number_in_the_name(tmp_path):
    keras_file(tmp_path / "model.02-0.31.keras", b"two", 1000)
    assert checkpoints.find(tmp_path).steps == []  # 31 is no number of anything
    checkpoints.note_epochs(tmp_path / "model.02-0.31.keras", 2)
    keras_file(tmp_path / "step-40.keras", b"two and some", 2000)
    assert checkpoints.find(tmp_path).steps == [2, 40]
    checkpoints.note_epochs(tmp_path / "step-40.keras", 2)
    assert checkpoints.find(tmp_path).steps == [2]
    checkpoints.require_whole(checkpoints.Checkpoint(tmp_path / "step-40.keras", 2))


def test_hidden_files_are_left_alone(tmp_path):
    keras_file(tmp_path / ".partial.keras", b"half", 9000)
    keras_file(tmp_path / "model-1.keras", b"one", 1000)
    assert [c.path.name for c in checkpoints.find(tmp_path).checkpoints] == ["model-1.keras"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no checkpoint; found nothing"),
        (["notes.txt"], "no checkpoint; found notes.txt"),
        (
            ["m_basegraph.meta"],
            "m_basegraph.meta is there, but no checkpoint m-<step>.index or m.index",
        ),
        (["m-4.index", "m-4.meta"], "no base graph .* before `import ddl`"),
        (["m.weights.h5"], "without the model they belong to.* model.save"),
    ],
)
def test_nothing_usable_says_what_is_there_and_what_to_write(tmp_path, names, message):
    touch(tmp_path, *names)
    with pytest.raises(CheckpointMissing, match=message):
        checkpoints.find(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(CheckpointMissing, match="no such folder"):
        checkpoints.find(tmp_path / "absent")


def test_choose_takes_all_for_latest_and_one_for_a_step(tmp_path):
    touch(tmp_path, "m_basegraph.meta", "m-9.index", "m-100.index", "m.index")
    found = checkpoints.find(tmp_path)
    assert [c.step for c in checkpoints.choose(found, "latest")] == [None, 100, 9]
    assert [c.step for c in checkpoints.choose(found, "9")] == [9]
    with pytest.raises(CheckpointMissing, match="no checkpoint at step 10; there are: 9, 100"):
        checkpoints.choose(found, "10")


@pytest.mark.parametrize(
    ("shards", "whole"),
    [
        (["m-1.data-00000-of-00001"], True),
        (["m-1.data-00000-of-00002", "m-1.data-00001-of-00002"], True),
        (["m-1.data-00001-of-00002"], False),
        (["m-10.data-00000-of-00001"], False),
        ([], False),
    ],
)
def test_a_checkpoint_is_whole_with_all_its_shards(tmp_path, shards, whole):
    touch(tmp_path, *shards)
    checkpoint = checkpoints.Checkpoint(tmp_path / "m-1", 1)
    if whole:
        checkpoints.require_whole(checkpoint)
    else:
        with pytest.raises(CheckpointUnreadable, match="m-1.data-. files are missing"):
            checkpoints.require_whole(checkpoint)


def test_shards_are_found_in_a_folder_with_brackets_in_the_name(tmp_path):
    touch(tmp_path, "m[1]-1.data-00000-of-00001")
    checkpoints.require_whole(checkpoints.Checkpoint(tmp_path / "m[1]-1", 1))


def test_a_keras_file_cut_short_or_damaged_is_unreadable(tmp_path):
    path = tmp_path / "model-1.keras"
    keras_file(path, b"weights" * 100, 1000)
    content = path.read_bytes()
    checkpoints.require_whole(checkpoints.Checkpoint(path, 1))
    path.write_bytes(content[:-40])
    with pytest.raises(CheckpointUnreadable):
        checkpoints.require_whole(checkpoints.Checkpoint(path, 1))
    at = content.index(b"weightsweights")
    path.write_bytes(content[:at] + b"W" + content[at + 1 :])
    with pytest.raises(CheckpointUnreadable, match=r"model.weights.h5 in it is damaged"):
        checkpoints.require_whole(checkpoints.Checkpoint(path, 1))
    # Each bit of the archive's directory: also those that ask for a method or a key.
    start = content.rindex(b"PK\x01\x02")
    for place in range(8 * start, 8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointUnreadable):  # some bits mean nothing
            checkpoints.require_whole(checkpoints.Checkpoint(path, 1))


def test_trouble_of_the_file_system_is_no_damage(tmp_path, monkeypatch):
    path = tmp_path / "model-1.keras"
    keras_file(path, b"weights", 1000)

    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(zipfile, "ZipFile", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        checkpoints.require_whole(checkpoints.Checkpoint(path, 1))

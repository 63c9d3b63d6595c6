"""Leaves only complete checkpoints to go on from.

``python -m ddl_ops.resume --aside DIR FOLDER...`` runs once, before the ranks of another try start.
Of each family of checkpoints, such as ``mnist-<step>``, it reads the newest one, and if that is
damaged or half written moves it to DIR and reads the one before. So a script goes on from a
complete checkpoint, however it looks for the newest one: by tf.train.latest_checkpoint, by a
session or an Estimator that does, or by the names of the files. And every rank finds the same.

Read are checkpoints of tf.train.Saver and tf.train.Checkpoint, against the checksums that
TensorFlow keeps, ``.keras`` files, against those of the archive, and ``.h5`` files, as far as HDF5
notices what is missing: it has no checksums. TensorFlow is imported only where there are any of its
own. Older checkpoints than the first complete one are not read.

What keras.callbacks.BackupAndRestore keeps is one checkpoint: without its weights it would take the
epoch from the file beside them, and train the last epochs on new weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddl_ops.checkpoints import Checkpoint, CheckpointUnreadable, require_whole

_SUFFIXES = (".index", ".keras", ".h5")
_STATE = "checkpoint"
# Of keras.callbacks.BackupAndRestore: its weights, and beside them how far they are trained. With
# double_checkpoint=True there are both of the time before, too.
_BACKUP, _BACKUP_EPOCH, _BEFORE = "latest.weights.h5", "training_metadata.json", ".bkp"


def leave_whole(folders: Sequence[Path], aside: Path) -> list[str]:
    """Moves damaged newest checkpoints to ``aside``; returns a sentence for each family.

    Raises OSError where a file cannot be read or moved for another reason than what is in it.
    """
    said = []
    families = list(_families(folders))
    for family in families:
        for path in family:
            if not path.is_file():
                continue  # a link to one that was damaged, and has been moved
            try:
                _require_readable(path)
            except CheckpointUnreadable as error:
                _move(path, aside)
                said.append(f"{_name(path)} is damaged or half written ({error}): now in {aside}")
                if path.name == _BACKUP and _put_back(path):
                    said.append(f"{path.name}{_BEFORE} takes its place")
                    break
            else:
                said.append(f"{_name(path)} is the newest complete one to go on from")
                break
        else:
            said.append(f"no complete one is left of {_name(family[0])} and those before")
    for folder in sorted({path.parent for (path, *_) in families if path.suffix == ".index"}):
        if (folder / _STATE).is_file() and not _newest_is_there(folder):
            said.append(_noted_anew(folder, aside))
    return said


def _families(folders: Sequence[Path]) -> Iterator[list[Path]]:
    """The files that stand for checkpoints, by folder and by name but for its numbers.

    The newest of each family comes first: as written; where that is one instant, as numbered.
    """
    families: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if _is_checkpoint(path) and not _is_served(path):
            families.setdefault((path.parent, re.sub(r"\d+", "#", path.name)), []).append(path)
    for family in families.values():
        yield sorted(family, key=_written, reverse=True)


def _is_checkpoint(path: Path) -> bool:
    """Whether a script finds one there: a link may lead to one that it has removed since."""
    return path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()


def _is_served(path: Path) -> bool:
    return (path.parent.parent / "saved_model.pb").exists()


def _written(path: Path) -> tuple[int, list[int]]:
    return path.stat().st_mtime_ns, [int(number) for number in re.findall(r"\d+", path.name)]


def _name(path: Path) -> str:
    return path.name.removesuffix(".index")


def _require_readable(path: Path) -> None:
    """Raises CheckpointUnreadable unless all of it can be read."""
    if path.suffix == ".h5":
        _require_hdf5(path)
        if path.name == _BACKUP:
            _require_epoch(path.with_name(_BACKUP_EPOCH))
        return
    checkpoint = Checkpoint(path.with_suffix("") if path.suffix == ".index" else path, None)
    require_whole(checkpoint)
    if path.suffix == ".index":
        _require_tensors(checkpoint.path)


def _require_hdf5(path: Path) -> None:
    import h5py

    try:
        h5py.File(path, "r").close()
    except OSError as error:
        if error.errno:  # not what is in it
            raise
        raise CheckpointUnreadable(str(error)) from error


def _require_epoch(path: Path) -> None:
    if not path.exists():
        return
    try:
        json.loads(path.read_bytes())["epoch"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointUnreadable(f"{path.name}: {error}") from error


def _require_tensors(prefix: Path) -> None:
    tf = _tensorflow()
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        for name, dtype in reader.get_variable_to_dtype_map().items():
            tf.raw_ops.RestoreV2(
                prefix=str(prefix), tensor_names=[name], shape_and_slices=[""], dtypes=[dtype]
            )
    except (tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError) as error:
        raise OSError(f"{prefix}: cannot be read: {error.message}") from error
    except tf.errors.OpError as error:
        first = (error.message or type(error).__name__).splitlines()[0]
        raise CheckpointUnreadable(re.sub(r"^\{\{.*?\}\} ", "", first)) from error


def _move(path: Path, aside: Path) -> None:
    aside.mkdir(parents=True, exist_ok=True)
    files = [path]
    if path.suffix == ".index":
        files += [
            other
            for other in path.parent.iterdir()
            if re.match(re.escape(_name(path)) + r"\.(data-|meta$)", other.name)
        ]
    if path.name == _BACKUP and (epoch := path.with_name(_BACKUP_EPOCH)).exists():
        files.append(epoch)
    for file in files:
        shutil.move(file, aside / file.name)


def _put_back(weights: Path) -> bool:
    """Whether Keras has kept the backup of before, which then is the newest."""
    epoch = weights.with_name(_BACKUP_EPOCH)
    before = [path.with_name(path.name + _BEFORE) for path in (weights, epoch)]
    try:
        if not before[0].exists():
            return False
        _require_hdf5(before[0])
        _require_epoch(before[1])
    except CheckpointUnreadable:
        return False
    for kept, path in zip(before, (weights, epoch), strict=True):
        if kept.exists():
            shutil.copyfile(kept, path)
    return True


def _newest_is_there(folder: Path) -> bool:
    try:
        noted = _tensorflow().train.get_checkpoint_state(str(folder))
    except ValueError:  # the note is cut short
        return False
    return noted is not None and _is_there(noted.model_checkpoint_path)


def _noted_anew(folder: Path, aside: Path) -> str:
    """Lets TensorFlow's note of the newest checkpoint name one that is there."""
    found = [path for path in folder.glob("*.index") if _is_checkpoint(path)]
    if not found:
        _move(folder / _STATE, aside)
        return f"{folder / _STATE} names what is not there: now in {aside}"
    found.sort(key=_written)
    # Without the folder, so that it may be moved.
    names = [_name(path) for path in found]
    _tensorflow().compat.v1.train.update_checkpoint_state(
        str(folder.absolute()), names[-1], all_model_checkpoint_paths=names
    )
    return f"{folder / _STATE} named what is not there, and now names {names[-1]}"


def _is_there(prefix: str) -> bool:
    return Path(f"{prefix}.index").exists() or Path(prefix).exists()


def _tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    return tf


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ddl_ops.resume", description=__doc__)
    parser.add_argument("--aside", required=True, type=Path)
    parser.add_argument("folders", nargs="+", type=Path)
    options = parser.parse_args(argv)
    for sentence in leave_whole(options.folders, options.aside):
        print(f"checkpoints: {sentence}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Leaves only complete checkpoints to go on from.

``python -m ddl_ops.resume --aside DIR FOLDER...`` runs once, before the ranks of another try start.
Of each family of checkpoints, such as ``mnist-<step>``, it reads the newest one, and if that is
damaged or half written moves it to DIR and reads the one before. So a script goes on from a
complete checkpoint, however it looks for the newest one: by tf.train.latest_checkpoint, by a
session or an Estimator that does, or by the names of the files. And every rank finds the same.
In DIR it is in a folder of the same name as before; where that has one of its name already, of an
earlier try, in a folder 2, 3 and so on.

Read are checkpoints of tf.train.Saver and tf.train.Checkpoint, against the checksums that
TensorFlow keeps, ``.keras`` files and the archives of folders ``preempted-<step>``, against those
of the archive, and ``.h5`` and ``.hdf5`` files, as far as HDF5 notices what is missing: it has no
checksums.
TensorFlow is imported only where there are any of its own. Older checkpoints than the first
complete one are not read.

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
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ddl_ops.checkpoints import (
    COUNTED,
    HDF5,
    Checkpoint,
    CheckpointUnreadable,
    require_archive,
    require_hdf5,
    require_whole,
)

_SUFFIXES = (".index", ".keras", *HDF5)
_STATE = "checkpoint"
# A folder of ddl.keras.PreemptionCallback (mid_epoch.py).
_PLACE = re.compile(r"preempted-\d+")
# Of keras.callbacks.BackupAndRestore: its weights, and beside them how far they are trained. With
# double_checkpoint=True there are both of the time before, too.
_BACKUP, _BACKUP_EPOCH, _BEFORE = "latest.weights.h5", "training_metadata.json", ".bkp"


def leave_whole(folders: Sequence[Path], aside: Path) -> list[str]:
    """Moves damaged newest checkpoints to ``aside``; returns a sentence for each family.

    Raises OSError where a file cannot be read or moved for another reason than what is in it.
    """
    look = _Look(folders, aside)
    families = list(_families(folders, aside))
    for family in families:
        if look.newest_whole(family) is None:
            look.said.append(f"no complete one is left of {_name(family[0])} and those before")
    for folder in sorted({path.parent for (path, *_) in families if path.suffix == ".index"}):
        if (folder / _STATE).is_file():
            look.at_note(folder)
    return look.said


class _Look:
    """What was read so far, and what was found.

    Attributes:
        said: a sentence for each.
    """

    def __init__(self, folders: Sequence[Path], aside: Path) -> None:
        self.said: list[str] = []
        self._folders = folders
        self._aside = aside
        self._whole: set[Path] = set()
        # Those that were moved, and when they were written.
        self._moved: dict[Path, tuple[int, list[int]]] = {}

    def newest_whole(self, newest_first: Iterable[Path]) -> Path | None:
        """The first that is complete; those before it are damaged, and are moved."""
        for path in newest_first:
            if path in self._whole:
                return path
            if not path.exists():
                continue  # a link to one that was damaged, and has been moved
            try:
                _require_readable(path)
            except CheckpointUnreadable as error:
                self._moved[path] = _written(path)
                why = f"is damaged or half written ({error})"
                self.said.append(f"{_name(path)} {why}: now in {self._move(path)}")
                if path.name == _BACKUP and _put_back(path):
                    self.said.append(f"{path.name}{_BEFORE} takes its place")
                    return path
            else:
                self.said.append(f"{_name(path)} is the newest complete one to go on from")
                self._whole.add(path)
                return path
        return None

    def at_note(self, folder: Path) -> None:
        """Lets TensorFlow's note of the newest checkpoint name one that is there.

        Of the same family: whoever restores that of another Saver, which may be newer, such as that
        of the best model, goes on from elsewhere, or finds no variable.
        """
        noted = _noted(folder)
        if noted is not None and _is_there(noted.model_checkpoint_path):
            return
        place = folder / _STATE
        # Path.glob() finds nothing in a folder that cannot be read now.
        names = [name for name in os.listdir(folder) if name.endswith(".index")]
        found = {folder / name for name in names if _is_checkpoint(folder / name)}
        chosen = self.newest_whole(self._to_go_on_from(folder, noted, found))
        if chosen is None:
            self.said.append(f"{place} names what is not there: now in {self._move(place)}")
            return
        # What is listed a Saver takes for its own, and removes when there are newer: neither
        # milestones, which it has taken off the list, nor what another one has saved.
        if noted is None:
            own = {path for path in found if _prefix(path) == _prefix(chosen) and path.exists()}
            kept = [(_name(path), None) for path in sorted(own, key=_written)]
        else:
            listed, times = noted.all_model_checkpoint_paths, noted.all_model_checkpoint_timestamps
            kept = [
                (here, time)
                for path, time in zip_longest(listed, times)
                if path and (here := _here(folder, path))
            ]
        _note(folder, _name(chosen), kept, noted)
        self.said.append(f"{place} named what is not there, and now names {_name(chosen)}")

    def _to_go_on_from(self, folder: Path, noted: Any | None, found: set[Path]) -> list[Path]:
        """Those in place of the one that is noted, the best first.

        First those of its prefix, then what is listed with it, then what is called like it but for
        numbers: not every script gives all of its checkpoints one name.
        """
        listed: set[Path] = set()
        if noted is not None:
            listed = {_index(folder, path) for path in noted.all_model_checkpoint_paths}
            gone = _index(folder, noted.model_checkpoint_path)
        else:
            here = (folder, ".index")
            moved = {p: at for p, at in self._moved.items() if (p.parent, p.suffix) == here}
            at = moved or {path: _written(path) for path in found}
            if not at:
                return []
            gone = max(at, key=at.__getitem__)

        def nearness(path: Path) -> int:
            if _prefix(path) == _prefix(gone):
                return 3
            return 2 if path in listed else int(_called(path) == _called(gone))

        near = [path for path in found if nearness(path)]
        return sorted(near, key=lambda path: (nearness(path), _written(path)), reverse=True)

    def _move(self, path: Path) -> Path:
        """Moves all of a checkpoint to where it was in its folder; returns where it is now."""
        root = next(folder for folder in self._folders if path.is_relative_to(folder))
        below = path.parent.relative_to(root)
        files = _files_of(path)
        place, number = self._aside / below, 1
        while any(os.path.lexists(place / file.name) for file in files):  # of an earlier try
            number += 1
            place = self._aside / str(number) / below
        place.mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.move(file, place / file.name)
        return place


def _families(folders: Sequence[Path], aside: Path) -> Iterator[list[Path]]:
    """The files that stand for checkpoints, by folder and by what their names have in common.

    The newest of each family comes first: as written; where that is one instant, as numbered.
    What was moved aside, perhaps in one of the folders, is none.
    """
    put_aside = aside.absolute()
    families: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.absolute().is_relative_to(put_aside):
            continue
        if _is_checkpoint(path) and not _is_served(path):
            families.setdefault((path.parent, _family(path)), []).append(path)
    for family in families.values():
        yield sorted(family, key=_written, reverse=True)


def _is_checkpoint(path: Path) -> bool:
    """Whether a script finds one there: a link may lead to one that it has removed since."""
    if _PLACE.fullmatch(path.name):
        return path.is_dir()
    return path.suffix in _SUFFIXES and not path.name.startswith(".") and path.is_file()


def _is_served(path: Path) -> bool:
    return (path.parent.parent / "saved_model.pb").exists()


def _written(path: Path) -> tuple[int, list[int]]:
    return path.stat().st_mtime_ns, [int(number) for number in re.findall(r"\d+", path.name)]


def _family(path: Path) -> str:
    """The name without what counts: numbers by themselves or after a word such as epoch, decimals
    as of a loss, and the last number. That of fold1-model-2.keras tells models apart.
    """
    name = re.sub(r"\d+\.\d+", "#", path.stem)
    name = re.sub(r"\d+(?=\D*$)", "#", name)
    counting = rf"(?<![^\W_])({COUNTED})?\d+"
    return re.sub(counting, r"\1#", name, flags=re.IGNORECASE) + path.suffix


def _called(path: Path) -> str:
    return re.sub(r"\d+", "#", path.name)


def _prefix(path: Path) -> str:
    """The name of a checkpoint of TensorFlow without its step."""
    return re.sub(r"-\d+$", "", _name(path))


def _name(path: Path) -> str:
    return path.name.removesuffix(".index")


def _require_readable(path: Path) -> None:
    """Raises CheckpointUnreadable unless all of it can be read."""
    if path.is_dir():
        for archive in sorted(path.glob("*.npz")):
            try:
                require_archive(archive)
            except CheckpointUnreadable as error:
                raise CheckpointUnreadable(f"{archive.name}: {error}") from error
        return
    if path.suffix in HDF5:
        require_hdf5(path)
        if path.name == _BACKUP:
            _require_epoch(path.with_name(_BACKUP_EPOCH))
        return
    checkpoint = Checkpoint(path.with_suffix("") if path.suffix == ".index" else path, None)
    require_whole(checkpoint)
    if path.suffix == ".index":
        _require_tensors(checkpoint.path)


def _require_epoch(path: Path) -> None:
    if not path.exists():
        return
    try:
        json.loads(path.read_bytes())["epoch"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointUnreadable(f"{path.name}: {error}") from error


def _require_tensors(prefix: Path) -> None:
    tf = _tensorflow()
    # Of the index TensorFlow gives one error, whether its bytes are wrong or do not come. It is
    # small; the data, which may be large, are read once.
    Path(f"{prefix}.index").read_bytes()
    try:
        reader = tf.train.load_checkpoint(str(prefix))
    except tf.errors.OpError as error:
        raise CheckpointUnreadable(_first_line(error)) from error
    # What is wrong in the data, or not there. All else is of the file system: EIO comes as Unknown,
    # ESTALE as Aborted, ETIMEDOUT as DeadlineExceeded, EAGAIN as Unavailable.
    damage = (
        tf.errors.DataLossError,
        tf.errors.OutOfRangeError,
        tf.errors.NotFoundError,
        tf.errors.InvalidArgumentError,
    )
    try:
        for name, dtype in reader.get_variable_to_dtype_map().items():
            tf.raw_ops.RestoreV2(
                prefix=str(prefix), tensor_names=[name], shape_and_slices=[""], dtypes=[dtype]
            )
    except damage as error:
        raise CheckpointUnreadable(_first_line(error)) from error
    except tf.errors.OpError as error:
        raise OSError(f"{prefix}: cannot be read: {_first_line(error)}") from error


def _first_line(error: Any) -> str:
    """Of what TensorFlow says, without the name of its function."""
    first = (error.message or type(error).__name__).splitlines()[0]
    return re.sub(r"^\{\{.*?\}\} ", "", first)


def _files_of(path: Path) -> list[Path]:
    """All of the checkpoint that a file stands for."""
    files = [path]
    if path.suffix == ".index":
        files += [
            other
            for other in path.parent.iterdir()
            if re.match(re.escape(_name(path)) + r"\.(data-|meta$)", other.name)
        ]
    if path.name == _BACKUP and (epoch := path.with_name(_BACKUP_EPOCH)).exists():
        files.append(epoch)
    return files


def _put_back(weights: Path) -> bool:
    """Whether Keras has kept the backup of before, which then is the newest."""
    epoch = weights.with_name(_BACKUP_EPOCH)
    before = [path.with_name(path.name + _BEFORE) for path in (weights, epoch)]
    try:
        if not before[0].exists():
            return False
        require_hdf5(before[0])
        _require_epoch(before[1])
    except CheckpointUnreadable:
        return False
    for kept, path in zip(before, (weights, epoch), strict=True):
        if kept.exists():
            shutil.copyfile(kept, path)
    return True


def _noted(folder: Path) -> Any | None:
    """What TensorFlow's note of the newest checkpoint says; None: it is cut short."""
    (folder / _STATE).read_bytes()  # TensorFlow says the same of one that cannot be read now
    try:
        return _tensorflow().train.get_checkpoint_state(str(folder))
    except ValueError:
        return None


def _note(
    folder: Path, newest: str, kept: Sequence[tuple[str, float | None]], noted: Any | None
) -> None:
    """Writes it anew, with names without the folder, so that it may be moved.

    Not by update_checkpoint_state(), which adds the newest to those that a Saver will remove.
    """
    from google.protobuf import text_format

    made = _tensorflow().compat.v1.train.generate_checkpoint_state_proto(
        str(folder.absolute()), newest
    )
    made.all_model_checkpoint_paths[:] = [name for name, _ in kept]
    if noted is not None:  # of a CheckpointManager, which removes none whose time it does not know
        made.last_preserved_timestamp = noted.last_preserved_timestamp
        times = [time for _, time in kept if time is not None]
        if len(times) == len(kept):
            made.all_model_checkpoint_timestamps[:] = times
    written = folder / f".{_STATE}"
    written.write_text(text_format.MessageToString(made), "utf-8")
    written.replace(folder / _STATE)


def _here(folder: Path, noted: str) -> str:
    """How the note is to name a checkpoint that it lists; empty if that is not there."""
    if _is_there(str(folder / Path(noted).name)):
        return Path(noted).name
    return noted if _is_there(noted) else ""


def _index(folder: Path, noted: str) -> Path:
    """In the folder, which may have been moved since that was noted."""
    return folder / f"{Path(noted).name}.index"


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

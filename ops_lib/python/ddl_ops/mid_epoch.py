"""Where a Keras training was when its ranks were asked to end: all that the next try goes on from.

A folder ``preempted-<step>`` beside the checkpoints has ``place.json`` (epochs and batches done,
number of ranks), ``model.npz`` with the weights and the optimizers' states, the same for all
ranks, ``optimizers.json``, and of each rank ``rank-<n>.npz`` with its random generators, its
metrics of the epoch so far, gradients that are not averaged yet, and the batches of it that this
rank has done. It has that name when all of it is there and on the disk, and loses it before any of
it is removed.

``optimizers.json`` has for each optimizer of the model the numbers of the weights that it trains,
null for a variable that is no weight; or null for an optimizer that has trained nothing, of which
``model.npz`` has nothing. Folders of earlier releases lack it: they have that of compile() alone.

No Keras and no TensorFlow: variables are what has ``value``, ``shape``, ``dtype`` and ``assign``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ddl_ops.arrays import add, broadcast, say
from ddl_ops.environment import PLACEMENT

_NAME = "preempted-"
_PLACE, _MODEL, _OPTIMIZERS = "place.json", "model.npz", "optimizers.json"
# Beside a rank's variables, which are numbered.
_BATCH, _WAITING = "batch", "waiting-"
_PIECE_BYTES = 64 << 20

# What optimizers.json has.
Trained = list[list[int | None] | None]


@dataclass(frozen=True)
class Place:
    """How far a training is.

    Attributes:
        step: steps done in all.
        epoch: epochs done.
        batch: batches of the next one done, by the rank that saved: those that had joined before
            have done fewer (read_batch).
        size: ranks that did them.
    """

    step: int
    epoch: int
    batch: int
    size: int


def newest(folder: Path) -> tuple[Path, Place] | None:
    """The newest whole one in ``folder``; None if there is none."""
    found = [
        (int(match[1]), path)
        for path in folder.glob(f"{_NAME}*")
        if (match := re.fullmatch(rf"{_NAME}(\d+)", path.name))
    ]
    for _, path in sorted(found, reverse=True):
        try:
            place = Place(**json.loads((path / _PLACE).read_text("utf-8")))
            read_optimizers(path)
            for file in (path / _MODEL, *path.glob("rank-*.npz")):
                zipfile.ZipFile(file).close()
        except (FileNotFoundError, ValueError, TypeError, zipfile.BadZipFile):
            _say_damaged(path)
        else:
            return path, place
    return None


@functools.cache
def _say_damaged(path: Path) -> None:
    if PLACEMENT.rank == 0:
        print(f"ddl: {path} is damaged or half written, and is passed over", flush=True)


def begin(folder: Path, step: int) -> Path:
    """Where the ranks write before it has its name. Empty on rank 0's disk, once it has called."""
    partial = folder / f".partial-{_NAME}{step}"
    if PLACEMENT.rank == 0:  # of a job that was killed
        shutil.rmtree(partial, ignore_errors=True)
    return partial


def write_model(partial: Path, place: Place, variables: Sequence[Any], optimizers: Trained) -> None:
    """What one rank writes for all."""
    partial.mkdir(parents=True, exist_ok=True)
    _write(partial / _MODEL, variables)
    for name, said in ((_OPTIMIZERS, optimizers), (_PLACE, asdict(place))):
        with (partial / name).open("w", encoding="utf-8") as file:
            json.dump(said, file)
            _to_disk(file)


def write_own(
    partial: Path, rank: int, batch: int, variables: Sequence[Any], waiting: Sequence[Any] = ()
) -> None:
    """What each rank writes of its own, with the batches of the epoch that it has done.

    Args:
        partial: of ``begin``.
        rank: this one.
        batch: of the epoch, done.
        variables: random generators and metrics.
        waiting: gradients of this rank that are not averaged yet.
    """
    partial.mkdir(parents=True, exist_ok=True)
    more = {f"{_WAITING}{n}": value for n, value in enumerate(_bytes_of(waiting))}
    _write(_own(partial, rank), variables, **more, **{_BATCH: np.int64(batch)})


def gather(partial: Path, saver: int) -> None:
    """Sends rank 0 what the others have written, and it does not see. Collective.

    Hosts may have disks of their own: what is on rank 0's is brought to where the next try is.

    Args:
        partial: of ``begin``.
        saver: the rank that has written the model.
    """
    size = PLACEMENT.size
    written = [(saver, partial / name) for name in (_MODEL, _OPTIMIZERS, _PLACE)]
    written += [(rank, _own(partial, rank)) for rank in range(size)]
    seen = [PLACEMENT.rank != 0 or path.exists() for _, path in written]
    unseen = np.array([not one for one in seen], np.int64)
    add("which files rank 0 does not see", unseen)
    for number in np.flatnonzero(unseen):
        _send_to_rank_0(*written[number])


def _send_to_rank_0(owner: int, path: Path) -> None:
    size = np.array([path.stat().st_size if PLACEMENT.rank == owner else 0])
    broadcast([size], owner)
    for at in range(0, int(size[0]), _PIECE_BYTES):
        piece = np.zeros(min(_PIECE_BYTES, int(size[0]) - at), np.uint8)
        if PLACEMENT.rank == owner:
            piece[:] = np.fromfile(path, np.uint8, len(piece), offset=at)
        broadcast([piece], owner)
        if PLACEMENT.rank == 0:
            with path.open("ab") as file:
                file.write(piece.data)
                _to_disk(file)


def finish(partial: Path, folder: Path, step: int) -> None:
    """Gives it its name, and removes older ones. By rank 0, when it has what all have written."""
    final = folder / f"{_NAME}{step}"
    _folder_to_disk(partial)
    if final.exists():  # a damaged one
        _unname(final)
    os.replace(partial, final)
    _folder_to_disk(folder)
    remove(folder, but=final)


def remove(folder: Path, but: Path | None = None) -> None:
    """Removes all of them, also unfinished ones, but for one."""
    for path in folder.glob(f"{_NAME}*"):
        if path != but:
            _unname(path)
    for path in folder.glob(f".partial-{_NAME}*"):
        shutil.rmtree(path, ignore_errors=True)


def _unname(path: Path) -> None:
    """Whoever is killed while it is removed leaves none that is half there."""
    removed = path.with_name(f".partial-{path.name}-removed")
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(removed)


def _to_disk(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # not every file system can
            os.fsync(opened)
    finally:
        os.close(opened)


def read_model(path: Path, variables: Sequence[Any]) -> None:
    """Gives variables the values that they had. Raises ValueError if they are others."""
    _read(path / _MODEL, variables)


def read_optimizers(path: Path) -> Trained | None:
    """Which weights each optimizer had trained; None for what an earlier release saved."""
    file = path / _OPTIMIZERS
    return json.loads(file.read_text("utf-8")) if file.exists() else None


def read_own(path: Path, rank: int, variables: Sequence[Any], waiting: Sequence[Any] = ()) -> None:
    """As ``read_model``; nothing for a rank that was not there, or was in an earlier release."""
    if (file := _own(path, rank)).exists():
        _read(file, variables)
        with np.load(file) as arrays:
            for number, variable in enumerate(waiting):
                if (name := f"{_WAITING}{number}") in arrays.files:
                    _assign(variable, arrays[name])


def read_batch(path: Path, rank: int, place: Place) -> int:
    """How many batches of the epoch this rank has done, if that is known, else the saver."""
    if (file := _own(path, rank)).exists():
        with np.load(file) as arrays:
            if _BATCH in arrays.files:
                return int(arrays[_BATCH])
    else:
        say(
            f"{file} is not there: random generators, metrics of the epoch and gradients that "
            "waited begin anew"
        )
    return place.batch


def _own(path: Path, rank: int) -> Path:
    return path / f"rank-{rank}.npz"


def _bytes_of(variables: Sequence[Any]) -> list[Any]:
    # NumPy's format has not all of TensorFlow's dtypes.
    values = [np.ascontiguousarray(variable.value) for variable in variables]
    return [value.reshape(-1).view(np.uint8) for value in values]


def _assign(variable: Any, value: Any) -> None:
    now = np.asarray(variable.value)
    variable.assign(value.view(now.dtype).reshape(now.shape))


def _write(path: Path, variables: Sequence[Any], **more: Any) -> None:
    arrays = {f"{n}": value for n, value in enumerate(_bytes_of(variables))}
    with path.open("wb") as file:
        np.savez(file, **arrays, **more)
        _to_disk(file)


def _read(path: Path, variables: Sequence[Any]) -> None:
    with np.load(path) as arrays:
        saved = len([name for name in arrays.files if name.isdigit()])
        if saved != len(variables):
            raise ValueError(
                f"{path} has {saved} variables, and the model {len(variables)}: it is "
                "of another model or optimizer. Remove its folder to go on from a checkpoint."
            )
        for number, variable in enumerate(variables):
            now = np.asarray(variable.value)
            value = arrays[f"{number}"]
            if value.nbytes != now.nbytes:
                raise ValueError(
                    f"{path}: {getattr(variable, 'path', number)} has {value.nbytes} bytes there, "
                    f"and {now.nbytes} in the model. Remove its folder to go on from a checkpoint."
                )
            _assign(variable, value)

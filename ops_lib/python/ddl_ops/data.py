"""The files of $DATA_DIR, also while they still come (``stream: true`` in the manifest).

Standard library only: scripts without TensorFlow import this module in place of ``ddl.data``.

The step that fetches the data keeps three files beside them, which ``ddl_airflow.storage.staging``
writes: ``.ddl-listing`` has the name of each file, as JSON, one a line, in the order in which they
come; ``.complete`` says that all are there; ``.ddl-failed`` why the rest never comes. A file is
there when all of it is.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from ddl_ops.environment import PLACEMENT

_LISTING, _COMPLETE, _FAILED = ".ddl-listing", ".complete", ".ddl-failed"
_OWN = frozenset((_LISTING, _COMPLETE, _FAILED))
_LOOK_S = 0.05


class StagingFailed(RuntimeError):
    """A file that a rank waits for never comes; says which, and why."""


def files(pattern: str = "*", *, by_rank: bool = False) -> Iterator[str]:
    """The absolute paths of the files in $DATA_DIR, each as soon as all of it is there.

    In the order of the store's listing, which is that of their names, the same on all ranks and
    each time. Where all are there, as after any training's first epoch, nothing waits. In a folder
    that was not staged, it is all files in it.

    Args:
        pattern: of names below $DATA_DIR, as "train-*" or "train/*.tfrecord"; "*" stands for any
            text, with slashes too.
        by_rank: only every n-th of these, of n ranks, so that each rank has files of its own. With
            fewer files than ranks, some have none.

    Raises:
        RuntimeError: at the call, without $DATA_DIR.
        StagingFailed: while it waits for a file that never comes; of a link to a folder above it,
            or to nothing; of a file that was removed since it was listed.
        FileNotFoundError: at the end, if no name matches.
    """
    folder = os.environ.get("DATA_DIR", "")
    if not folder:
        raise RuntimeError(
            "DATA_DIR is not set. The train step sets it; by hand, set it to the data's folder."
        )
    return _files(os.path.abspath(folder), pattern, by_rank)


def _files(folder: str, pattern: str, by_rank: bool) -> Iterator[str]:
    matching = _Counted(name for name in _listing(folder) if fnmatchcase(name, pattern))
    step, first = (PLACEMENT.size, PLACEMENT.rank) if by_rank else (1, 0)
    mine = islice(matching, first, None, step)
    name = next(mine, None)
    while name is not None:
        path = os.path.join(folder, name)
        _wait_for(path, folder)
        name = next(mine, None)
        if name is None:
            _note_read()
        yield path
    if not matching.count:
        raise FileNotFoundError(f"{folder} has no file with a name like {pattern!r}.")


class _Counted:
    """An iterator that knows how many there were."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = iter(names)
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        name = next(self._names)
        self.count += 1
        return name


def _listing(folder: str) -> Iterator[str]:
    try:
        with open(os.path.join(folder, _LISTING), encoding="utf-8") as listing:
            for line in listing:
                yield json.loads(line)
    except FileNotFoundError:  # all was there before any rank
        yield from _found(folder)


def _found(folder: str) -> list[str]:
    return sorted(name for name in _below(folder, "", frozenset()) if name not in _OWN)


def _below(folder: str, start: str, parents: frozenset[str]) -> Iterator[str]:
    here = os.path.realpath(folder)
    if here in parents:
        raise StagingFailed(f"{folder} links to a folder above itself. Remove the link.")
    try:
        # Whether it is a folder also by a link, as what is staged is listed.
        entries = [(entry.name, entry.path, entry.is_dir()) for entry in os.scandir(folder)]
    except PermissionError as error:
        if start != "lost+found/":  # root's, at the top of a disk
            message = f"{error.filename} may not be read, and what is in {folder} is left out"
            warnings.warn(message, stacklevel=2)
        return
    for name, path, is_folder in entries:
        if is_folder:
            yield from _below(path, f"{start}{name}/", parents | {here})
        else:
            yield f"{start}{name}"


def _wait_for(path: str, folder: str) -> None:
    while not os.path.exists(path):
        if os.path.exists(os.path.join(folder, _COMPLETE)):
            _ask_anew(path)
            if not os.path.exists(path):
                raise StagingFailed(f"{path} is gone: it was there when all of the data was.")
        with suppress(FileNotFoundError):
            why = Path(folder, _FAILED).read_text("utf-8")
            raise StagingFailed(f"{path} does not come. The data could not be staged: {why}")
        if not os.path.exists(os.path.join(folder, _LISTING)):  # nobody brings any
            _require_there(path)
            return
        time.sleep(_LOOK_S)
        _ask_anew(path)


def _ask_anew(path: str) -> None:
    """Lets a host that shares the folder not go by what it knows of the files in it."""
    with suppress(FileNotFoundError):
        os.close(os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY))


def _require_there(path: str) -> None:
    """Of a folder that was not staged, in which it was found."""
    try:
        os.stat(path)
    except OSError as error:
        if os.path.islink(path):
            raise StagingFailed(
                f"{path} is a link to {os.readlink(path)}, where no file can be read "
                f"({error.strerror}). Remove the link, as of an editor's lock, or ask for a "
                "pattern that leaves it out."
            ) from error
        if isinstance(error, FileNotFoundError):
            raise StagingFailed(
                f"{path} is gone: it was there when $DATA_DIR was listed. Put it back, and let "
                "nothing remove or rename files there while ranks read them."
            ) from error
        raise


def _note_read() -> None:
    """Tells the step that this rank had all files that it asked for."""
    if directory := os.environ.get("DDL_RECORD_DIR"):
        Path(directory, f"rank-{PLACEMENT.rank}.read").touch()

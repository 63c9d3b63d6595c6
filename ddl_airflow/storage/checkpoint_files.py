"""Which files of RESULT_DIR are a checkpoint's, and which checkpoints are to be gone on from.

As far as names, times and what is written last tell: what is in them, ``ddl_ops.resume`` reads.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.checkpoint_names import CHECKPOINT, EVENTS, LEFT_OUT
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.storage.filesystem import paths_below

# Suffixes of files that stand for a checkpoint: ddl_ops.resume reads these, and moves damaged ones.
READ_AGAIN = (".index", ".keras", ".h5", ".hdf5")
_IN_CHECKPOINTS = "checkpoints/"  # CHECKPOINT_DIR, whatever is in it
_HDF5 = b"\x89HDF\r\n\x1a\n"
# Beside what was damaged in RESULT_DIR: that of EXPERIMENT_DIR, and newer ones that gave way.
_NOT_DAMAGED_HERE = re.compile(r"(?:experiment|result-\d+)/")


@dataclass(frozen=True)
class Found:
    """A file as it is: what changes whenever its content does."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def is_checkpoint(key: str) -> bool:
    """Whether a file below RESULT_DIR may be one of a checkpoint's."""
    if key.rpartition("/")[2].startswith(EVENTS):
        return False
    return key.startswith(_IN_CHECKPOINTS) or CHECKPOINT.fullmatch(key) is not None


def found_in(folder: Path, root: Path) -> dict[str, Found]:
    """The files in a folder in which ranks write, by their keys.

    Links, and what is not the folder's own, are left out, as they are when results are published;
    and what may not be read, but for folders and what is called as checkpoints are.
    """
    found = {}
    for path in paths_below(folder) if folder.is_dir() else ():
        key = path.relative_to(folder).as_posix()
        if LEFT_OUT.fullmatch(key):
            continue
        try:
            now = _looked_at(path, root, key)
        except (FileRefused, OSError):
            continue
        found[key] = Found(now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino)
    return found


def has_any(folder: Path, root: Path) -> bool:
    """Whether ranks may go on from anything in a folder, whatever they call it."""
    return any(".tfevents." not in key for key in found_in(folder, root))


def _looked_at(path: Path, root: Path, key: str) -> os.stat_result:
    """Raises as ``open_beneath``."""
    try:
        descriptor = open_beneath(path, root)
    except PermissionError:
        now = os.lstat(path)
        if stat.S_ISDIR(now.st_mode) or CHECKPOINT.fullmatch(key):
            return now
        raise
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def is_to_go_on_from(folder: Path, root: Path, aside: Path) -> bool:
    """Whether a folder has checkpoints: where a damaged one was moved to ``aside``, such as are
    read again, for others may be what was beside it.
    """
    here = newest_by_name((key, one.mtime_ns) for key, one in found_in(folder, root).items())
    return bool(newest_read_again(here) if damaged_in(aside) else here)


def is_read_again(key: str) -> bool:
    return is_checkpoint(key) and key.endswith(READ_AGAIN)


def _called(key: str) -> str:
    """What the files of checkpoints of all steps have in common, also once they are elsewhere."""
    return re.sub(r"\d+(?=.*\.)", "#", key.rpartition("/")[2])  # of .h5 the number stays


def newest_by_name(times: Iterable[tuple[str, int]]) -> dict[str, int]:
    """When the newest of checkpoints that are called alike was written, of keys and times."""
    newest: dict[str, int] = {}
    for key, mtime_ns in times:
        if is_checkpoint(key):
            newest[_called(key)] = max(mtime_ns, newest.get(_called(key), 0))
    return newest


def newest_read_again(written: Mapping[str, int], of_steps: bool = False) -> int:
    """When the newest was written of those that were found whole; or of those with a number."""
    return max(
        (
            mtime_ns
            for name, mtime_ns in written.items()
            if name.endswith(READ_AGAIN) and ("#" in name or not of_steps)
        ),
        default=0,
    )


def damaged_in(aside: Path | None) -> set[str]:
    """What those are called of which a damaged one was moved away, from whatever folder."""
    if aside is None:
        return set()
    with suppress(OSError):
        moved = [path.relative_to(aside).as_posix() for path in paths_below(aside)]
        return {
            _called(key)
            for key in moved
            if key.endswith(READ_AGAIN) and not _NOT_DAMAGED_HERE.match(key)
        }
    return set()


def is_further(one: Mapping[str, int], other: Mapping[str, int], damaged: set[str]) -> bool:
    """Whether checkpoints are to be gone on from, and not others: first by those of which one was
    damaged, for what is beside them may be newer; then by the newest of all.

    Not so where another one of a step is newer than all of these: the script has gone on without.
    """
    if newest_read_again(other, of_steps=True) > max(one.values(), default=0):
        return False
    pairs = [(one.get(name, 0), other.get(name, 0)) for name in damaged]
    if any(mine != its for mine, its in pairs):
        return any(mine > its for mine, its in pairs)
    return max(one.values(), default=0) > max(other.values(), default=0)


def are_there(files: list[dict[str, Any]], found: Mapping[str, Found]) -> bool:
    """Whether the checkpoints of a snapshot, of which there are any, are the ones of a folder."""
    read = [file for file in files if is_read_again(file["key"])]
    return bool(read) and all(
        (one := found.get(file["key"])) is not None
        and (one.size, one.mtime_ns) == (file["size"], file["mtime_ns"])
        for file in read
    )


def is_as_found(key: str, found: Found, now: os.stat_result) -> bool:
    """Whether what was read of an open file is what was found, wherever its name leads now."""
    if now.st_ino != found.inode:
        return False
    if not is_checkpoint(key):  # of one that only grows, what was there is whole
        return now.st_size >= found.size
    if (now.st_size, now.st_mtime_ns) != (found.size, found.mtime_ns):
        return False
    return now.st_ctime_ns == found.ctime_ns or not now.st_nlink  # it was removed, or replaced


def is_half(key: str, file: IO[bytes]) -> bool:
    """Whether a file of Keras, of which nobody knows more, has not what is written last: the table
    of an archive; of HDF5 the size, which is at its beginning.

    Source: the HDF5 File Format Specification, level 0A, for addresses of 8 bytes.
    """
    if not key.endswith((".keras", ".h5", ".hdf5")):
        return False
    try:
        head, nbytes = file.read(64), file.seek(0, os.SEEK_END)
        if head.startswith(_HDF5):
            at = {b"\0": 40, b"\1": 44}.get(head[8:9], 28)
            half = int.from_bytes(head[at : at + 8], "little") != nbytes
        else:
            half = b"PK\3\4".startswith(head[:4]) and not zipfile.is_zipfile(file)
    except zipfile.BadZipFile:
        half = True
    except OSError as error:
        if error.errno != errno.ESTALE:  # another host has removed it: so finds who reads it
            raise
        half = True
    file.seek(0)
    return half

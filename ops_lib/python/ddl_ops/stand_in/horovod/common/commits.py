"""What elastic states have committed, in files that outlive the job. Imports no framework.

``horovod-<state>-<number>.commit``, of which each state keeps the last two, is: a line that names
the format; the length of the header in 8 bytes; the header, JSON; the bytes of the arrays one after
the other; the attributes, and arrays of texts, pickled; SHA-256 of all that. A file gets its name
when all of it is on disk.

It is unpickled only if it belongs to the user who reads it, or to the folder's, and nobody else may
write it: whoever can make such a file can run programs as that user anyway.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ddl_ops.arrays import say

from horovod.common.util import pickled, unpickled

_FORMAT = b"ddl commit 1\n"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 64 << 20
_KEPT = 2
# Who commits after each batch is told once, if writing takes that much of the time.
_OFTEN = 0.25
_OFTEN_AFTER_S = 60.0


class CommitUnusable(Exception):
    """This file is no whole commit of this training; the one before may be."""


@dataclass(frozen=True)
class Commit:
    """What a state was at.

    Attributes:
        checks: how often the ranks had asked each other whether to end.
        attributes: plain Python objects by name.
        arrays: values of variables.
    """

    checks: int
    attributes: dict[str, Any]
    arrays: Sequence[np.ndarray[Any, Any]]


class Commits:
    """Those of one state, in a folder that all starts of the job have. One rank writes.

    Args:
        folder: made when it is needed.
        state: its number in the script, from 1.
        training: whose they are; those of others are not read.
    """

    def __init__(self, folder: Path, state: int, training: str) -> None:
        self.number = 0  # of the newest that is or was there
        self._folder = folder
        self._state = state
        self._training = training
        self._began = time.monotonic()
        self._writing_s = 0.0
        self._told = False

    def newest(self) -> Commit | None:
        """The newest that is whole, and takes note of its number; None if there is none.

        Says which are passed over, and why, and removes what was not finished.

        Raises:
            OSError: the file system does not give it.
            RuntimeError: its attributes cannot be made objects again.
        """
        for left in self._folder.glob(f".horovod-{self._state}-*.partial"):
            left.unlink(missing_ok=True)
        there = self._there()
        self.number = max(there, default=0)
        for number in sorted(there, reverse=True):
            path = self._path(number)
            try:
                found = self._read(path)
            except CommitUnusable as error:
                say(f"hvd.elastic: {path} is passed over: {error}")
                continue
            say(f"hvd.elastic: goes on from {path.name}")
            return found
        return None

    def write(self, number: int, commit: Commit) -> None:
        """Returns when it is on disk. Raises OSError if that cannot be."""
        began = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(number)
        partial = path.with_name(f".{path.name}.partial")
        partial.unlink(missing_ok=True)
        try:
            self._write_parts(partial, commit)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        for older in sorted(self._there())[:-_KEPT]:
            self._path(older).unlink(missing_ok=True)
        self._tell_if_often(time.monotonic() - began)

    def _path(self, number: int) -> Path:
        return self._folder / f"horovod-{self._state}-{number}.commit"

    def _there(self) -> list[int]:
        names = (path.name for path in self._folder.glob(f"horovod-{self._state}-*.commit"))
        pattern = rf"horovod-{self._state}-(\d{{1,15}})\.commit"
        return [int(match[1]) for name in names if (match := re.fullmatch(pattern, name))]

    def _write_parts(self, partial: Path, commit: Commit) -> None:
        objects = {n: one for n, one in enumerate(commit.arrays) if one.dtype.hasobject}
        header = {
            "training": self._training,
            "checks": commit.checks,
            "arrays": [[array.dtype.name, list(np.shape(array))] for array in commit.arrays],
        }
        text = json.dumps(header).encode()
        parts = [
            _FORMAT + len(text).to_bytes(_LENGTH_BYTES, "little") + text,
            *(
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                for array in commit.arrays
                if not array.dtype.hasobject
            ),
            pickled((commit.attributes, objects)),
        ]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(partial, flags, 0o640), "wb") as file:
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> Commit:
        data = memoryview(_own_bytes(path))
        end = len(data) - hashlib.sha256().digest_size
        if end < 0 or hashlib.sha256(data[:end]).digest() != data[end:]:
            raise CommitUnusable("it is damaged or half written")
        begin = len(_FORMAT) + _LENGTH_BYTES
        length = int.from_bytes(data[len(_FORMAT) : begin], "little")
        if data[: len(_FORMAT)] != _FORMAT or length > _MOST_HEADER_BYTES:
            raise CommitUnusable("it has another format")
        header = json.loads(bytes(data[begin : begin + length]))
        if header["training"] != self._training:
            raise CommitUnusable(f"it is of training {header['training']!r}")
        begin += length
        arrays: list[np.ndarray[Any, Any]] = []
        for dtype, shape in header["arrays"]:
            kind = np.dtype(dtype)
            if kind.hasobject:
                arrays.append(np.empty(0))  # comes below
                continue
            count = int(np.prod(shape, dtype=np.int64))
            array = np.frombuffer(data, kind, count, begin).reshape(shape).copy()
            arrays.append(array)
            begin += array.nbytes
        try:
            attributes, objects = unpickled(data[begin:end])
        except Exception as error:
            raise RuntimeError(
                f"{path}: its attributes cannot be made objects again: {type(error).__name__}: "
                f"{error}. Remove the file to go on from the one before, or from the start."
            ) from error
        for number, array in objects.items():
            arrays[number] = array
        return Commit(header["checks"], attributes, arrays)

    def _tell_if_often(self, seconds: float) -> None:
        self._writing_s += seconds
        passed_s = time.monotonic() - self._began
        if self._told or passed_s < _OFTEN_AFTER_S or self._writing_s < _OFTEN * passed_s:
            return
        self._told = True
        say(
            f"hvd.elastic: commits have taken {self._writing_s:.0f} s of {passed_s:.0f} s. Commit "
            "less often: a start after a loss goes on from the last one."
        )


def _own_bytes(path: Path) -> bytes:
    """A file's bytes; raises CommitUnusable unless it is a file that nobody else may write."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CommitUnusable("it is a link") from error
    with open(opened, "rb") as file:
        known = os.fstat(opened)
        if not stat.S_ISREG(known.st_mode):
            raise CommitUnusable("it is no regular file")
        # Where the file server gives all files one owner, that is the folder's, too.
        if known.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise CommitUnusable(f"it belongs to user {known.st_uid}")
        if known.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CommitUnusable("others than its owner may write it")
        return file.read()

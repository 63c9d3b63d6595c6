"""What elastic states have committed, in files that outlive the job. Imports no framework.

``horovod-<state>-<number>.commit``, of which each state keeps the last two, is: a line that names
the format; the length of the header in 8 bytes; the header, JSON; the bytes of the arrays one after
the other; the attributes, and arrays of texts, pickled; SHA-256 of all that. A file gets its name
when all of it is on disk. <state> is a digest of where the script trains it (``Place``); in earlier
releases it was the number of the state in its process.

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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from ddl_ops.arrays import say

from horovod.common.util import pickled, unpickled

_FORMAT = b"ddl commit 1\n"
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 64 << 20
_KEPT = 2
_STATE_DIGITS = 15  # hexadecimal, so that it fits a signed number of 64 bits
_NAME = re.compile(rf"horovod-([0-9a-f]{{{_STATE_DIGITS}}}|\d{{1,9}})-(\d{{1,15}})\.commit")
_NAMED = 4  # in one sentence
# Who commits after each batch is told once, if writing takes that much of the time.
_OFTEN = 0.25
_OFTEN_AFTER_S = 60.0


class CommitUnusable(Exception):
    """This file is no whole commit of this training; the one before may be."""


class CommitRefused(CommitUnusable):
    """Others than its user could have made this file."""


@dataclass(frozen=True)
class Place:
    """Where a script trains a state: what tells its states apart in all starts of the job.

    Attributes:
        script: digest of its file's name and its arguments.
        function: qualified name of the one that trains.
        file: name of that from which it is called.
        line: of the call.
        times: how often a state has been trained from there in this process, this one included.
        names: of the state's attributes.
        source: digest of the file; a script may be mended between two starts.
        text: digest of the line.
        folders: digest of where the script and the file are.
        ordinal: the number of the state in this process, by which earlier releases knew it.
        lines: digests of the file's lines. Not in headers.
    """

    script: str
    function: str
    file: str
    line: int
    times: int
    names: tuple[str, ...]
    source: str
    text: str
    folders: str
    ordinal: int
    lines: frozenset[str] = frozenset()

    def state(self, training: str) -> str:
        """Digest of what the place has wherever the script is, and of the training."""
        facts = [*(getattr(self, name) for name in _OF_A_STATE), training]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:_STATE_DIGITS]

    def header(self) -> dict[str, Any]:
        """As JSON has it."""
        facts = asdict(self) | {"names": list(self.names)}
        del facts["lines"]
        return facts

    def was(self, headers: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Which of these states may be the one of this place, before the file was mended.

        Args:
            headers: the place of each, as its commit has it.

        Returns more than one if they cannot be told apart.
        """

        def alike(states: Iterable[str], *names: str) -> list[str]:
            mine = self.header()
            return [
                one for one in states if all(headers[one].get(name) == mine[name] for name in names)
            ]

        if same := alike(headers, *_OF_A_STATE):  # mended, and then not
            return same
        # A file that is the same has this place, so another one of it is another state. And two
        # that differ may be two scripts of the same name, if they are not in the same folder.
        mended = [one for one, place in headers.items() if place["source"] != self.source]
        states = alike(mended, "script", "function", "file", "folders")
        changed = [one for one in states if headers[one].get("text") not in self.lines]
        states = alike(states, "text") or alike(changed, "ordinal")
        for name in ("names", "ordinal"):
            states = alike(states, name) or states
        return states


_OF_A_STATE = ("script", "function", "file", "line", "times", "names", "source")


def state_of(number: int) -> str:
    """What Place.state gives, of the number that it is."""
    return f"{number:0{_STATE_DIGITS}x}"


def _shown(place: Mapping[str, Any]) -> str:
    again = f", time {place['times']}" if place["times"] != 1 else ""
    return f"{place['function']} ({place['file']}:{place['line']}{again})"


@dataclass(frozen=True)
class Commit:
    """What a state was at.

    Attributes:
        checks: how often the ranks had asked each other whether to end.
        attributes: plain Python objects by name.
        arrays: values of variables.
        trained: numbers of the weights of a Keras model for which its optimizer has variables, in
            its order; None for a variable of none. None as a whole in commits of earlier releases.
    """

    checks: int
    attributes: dict[str, Any]
    arrays: Sequence[np.ndarray[Any, Any]]
    trained: Sequence[int | None] | None = None


class Commits:
    """Those of one state, in a folder that all starts of the job have. One rank writes.

    Args:
        folder: made when it is needed.
        place: of the state.
        training: whose they are; those of others are not read.

    Attributes:
        number: of the newest that is or was there.
        state: in the names of files. The same on all ranks, which may have other arguments.
    """

    def __init__(self, folder: Path, place: Place, training: str) -> None:
        self.number = 0
        self.state = place.state(training)
        self._folder = folder
        self._place = place
        self._training = training
        self._passed: set[int] = set()
        self._written = False
        self._began = time.monotonic()
        self._writing_s = 0.0
        self._told = False

    def newest(self, known: Collection[str] = ()) -> Commit | None:
        """The newest that is whole, and takes note of its number; None if there is none.

        Says which are passed over, and why, and where none fits but there are others. Removes what
        was not finished.

        Args:
            known: the states that this process has gone on from, or begun.

        Raises:
            OSError: the file system does not give it.
            RuntimeError: its attributes cannot be made objects again; or it is there, and is not
                read, because others than this user could have made it; or several may be the one,
                as of a script that was mended.
        """
        for left in self._folder.glob(f".horovod-{self.state}-*.partial"):
            left.unlink(missing_ok=True)
        if not self._there():
            self._adopt(known)
        there = self._there()
        self.number = max(there, default=0)
        refused = ""
        for number in sorted(there, reverse=True):
            path = self._path(number)
            try:
                found = self._read(path)
            except CommitUnusable as error:
                self._passed.add(number)
                if isinstance(error, CommitRefused):
                    refused = refused or f"{path} is not gone on from: {error}"
                say(f"hvd.elastic: {path} is passed over: {error}")
                continue
            say(f"hvd.elastic: goes on from {path.name}")
            return found
        if refused:
            raise RuntimeError(f"hvd.elastic: {refused}. Or remove it, to begin from the start.")
        return None

    def _adopt(self, known: Collection[str]) -> None:
        """Takes over commits of this place that have another name; says so if there are others.

        They are of an earlier release, or of the script before it was mended.
        """
        others = {one: head for one, head in self._others() if one not in known}
        ours = {
            one: place for one, (training, place) in others.items() if training == self._training
        }
        mine = self._place.was({one: place for one, place in ours.items() if place})
        if not mine and ours.get(former := str(self._place.ordinal)) == {}:
            mine = [former]
        if len(mine) > 1:
            files = ", ".join(self._path(max(self._there(one)), one).name for one in mine)
            raise RuntimeError(
                f"hvd.elastic: {_shown(self._place.header())} was mended, and in {self._folder} "
                f"each of these may be the one to go on from: {files}. Move the files of "
                "the others, which differ in the last number only, to another folder."
            )
        if mine:
            for left in self._folder.glob(f".horovod-{mine[0]}-*.partial"):
                left.unlink(missing_ok=True)
            for number in sorted(self._there(mine[0]), reverse=True):
                self._path(number, mine[0]).rename(self._path(number))
        elif others:
            shown = sorted({self._said(*head) for head in others.values()})
            more = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
            say(
                f"hvd.elastic: {_shown(self._place.header())} begins anew: {self._folder} has "
                f"commits of others: {', '.join(shown[:_NAMED])}{more}"
            )

    def _others(self) -> Iterator[tuple[str, tuple[str, dict[str, Any]]]]:
        """States in the folder with the training and the place of their newest readable commit."""
        for state, numbers in sorted(self._all().items()):
            for number in sorted(numbers, reverse=True):
                try:
                    with _opened(self._path(number, state)) as file:
                        header = _header(file)
                except (CommitUnusable, PermissionError):
                    continue
                yield state, (header["training"], header.get("place", {}))
                break

    def _said(self, training: str, place: dict[str, Any]) -> str:
        what = _shown(place) if place else "an earlier release"
        if training != self._training:
            return f"{what} of training {training!r}"
        if place and place["script"] != self._place.script:
            return f"{what} of another script, or with other arguments"
        if place and place.get("folders") != self._place.folders:
            same = place["source"] == self._place.source
            return what if same else f"{what} of a script in another folder that is not the same"
        return what

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
        for older in sorted({*self._there()} - self._passed)[:-_KEPT]:
            self._path(older).unlink(missing_ok=True)
        if not self._written and (why := _why_refused(path.stat(), path)):
            say(f"hvd.elastic: no later start will go on from {path}: {why}")
        self._written = True
        self._tell_if_often(time.monotonic() - began)

    def _path(self, number: int, state: str = "") -> Path:
        return self._folder / f"horovod-{state or self.state}-{number}.commit"

    def _there(self, state: str = "") -> list[int]:
        return self._all().get(state or self.state, [])

    def _all(self) -> dict[str, list[int]]:
        """The numbers of all commits in the folder, by state."""
        found: dict[str, list[int]] = {}
        for path in self._folder.glob("horovod-*.commit"):
            if match := _NAME.fullmatch(path.name):
                found.setdefault(match[1], []).append(int(match[2]))
        return found

    def _write_parts(self, partial: Path, commit: Commit) -> None:
        objects = {n: one for n, one in enumerate(commit.arrays) if one.dtype.hasobject}
        header = {
            "training": self._training,
            "place": self._place.header(),
            "checks": commit.checks,
            "trained": commit.trained,
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
        with _opened(path) as file:
            known, data = os.fstat(file.fileno()), memoryview(file.read())
            end = len(data) - hashlib.sha256().digest_size
            if end < 0 or hashlib.sha256(data[:end]).digest() != data[end:]:
                raise CommitUnusable("it is damaged or half written")
            file.seek(0)
            header, begin = _header(file), file.tell()
        if header["training"] != self._training:
            raise CommitUnusable(f"it is of training {header['training']!r}")
        if why := _why_refused(known, path):
            raise CommitRefused(why)
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
        return Commit(header["checks"], attributes, arrays, header.get("trained"))

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


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a file. Raises CommitUnusable if it is a link, or none."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CommitUnusable("it is a link") from error
    with open(opened, "rb") as file:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise CommitUnusable("it is no regular file")
        yield file


def _header(file: BinaryIO) -> dict[str, Any]:
    """The header, after which the arrays come. Raises CommitUnusable if there is none."""
    begin = file.read(len(_FORMAT) + _LENGTH_BYTES)
    length = int.from_bytes(begin[len(_FORMAT) :], "little")
    if begin[: len(_FORMAT)] != _FORMAT or length > _MOST_HEADER_BYTES:
        raise CommitUnusable("it has another format")
    try:
        header: dict[str, Any] = json.loads(file.read(length))
    except ValueError as error:
        raise CommitUnusable("it is damaged or half written") from error
    if "training" not in header or {*_OF_A_STATE} - {*header.get("place", _OF_A_STATE)}:
        raise CommitUnusable("it has another format")
    return header


def _why_refused(known: os.stat_result, path: Path) -> str:
    """Why others than this user could have made a file, and the cure; empty if they could not."""
    # Where the file server gives all files one owner, that is the folder's, too.
    if known.st_uid not in (os.geteuid(), path.parent.stat().st_uid):
        return (
            f"it belongs to user {known.st_uid}, and could be a program of theirs. If it is yours: "
            f"chown {os.geteuid()} {path}"
        )
    if known.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"others than its owner may write it (mode {stat.S_IMODE(known.st_mode):04o}). If "
            f"nobody has: chmod go-w {path}; where the file system gives all files this mode, "
            "mount it with another umask, or take another CHECKPOINT_DIR"
        )
    return ""

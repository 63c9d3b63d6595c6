"""One object into one file: in parts, several at once, of which none that is there comes twice.

A part is a ``PIECE``. Which ones are there is in a journal beside the file: whoever goes on, after
the process was killed, reads them back, and fetches what is missing or is not what it was. Each
byte is digested while it is in memory, for its piece and, in the order of the parts, for the whole;
at most ``_AT_ONCE`` parts are in memory, of all objects of the process together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ddl_airflow.core.errors import TransferCorrupt
from ddl_airflow.storage.fingerprint import Digest
from ddl_airflow.storage.store import CHUNK, PIECE, Advance, Fetched

_AT_ONCE = 8  # parts in memory, and under way of one object
_SMALL = CHUNK  # objects up to this size have memory of their own
_LOOK_S = 0.1
_log = logging.getLogger(__name__)


class WholeDigest(Digest, Protocol):
    """A digest of all bytes, as a store writes it."""

    def hexdigest(self) -> str:
        """Of the bytes so far."""


@dataclass
class Check:
    """How to tell that what came is right: a digest that must be ``expected``.

    Attributes:
        name: as ``Fetched.checked`` has it.
        digest: None: there is none, and sizes must do.
        expected: what must come out.
        proof: False where a difference may as well come from a wrong guess of the part size.
    """

    name: str
    digest: WholeDigest | None = None
    expected: str = ""
    proof: bool = True

    def result(self) -> str:
        """The name; "size" if it could not decide. Raises ValueError on other content."""
        if self.digest is None or (found := self.digest.hexdigest()) == self.expected:
            return self.name
        if self.proof:
            raise ValueError(f"{self.name} is {found}, not {self.expected}")
        return "size"


class Source(Protocol):
    """An object, in the version that was listed. Used by many threads."""

    def read(self, start: int, into: memoryview, advance: Advance) -> None:
        """Fills ``into`` with the bytes from ``start`` on, in as many tries as may help.

        Raises:
            StagingError: it could not.
        """

    def check(self) -> Check:
        """A new one for all bytes; asks the store, where nothing was read yet."""

    def corrupt(self, why: str) -> TransferCorrupt:
        """The error that names the object."""


def download(source: Source, size: int, path: Path, advance: Advance) -> Fetched:
    """Writes the object's bytes, and flushes them to disk.

    What comes out wrong is fetched once more, all of it: only the whole has a digest that the
    store knows.

    Args:
        source: the object.
        size: of it, in bytes.
        path: of the file; goes on with what is there, if ``journal_of`` it is.
        advance: gets each byte once, whether it is fetched or was there.

    Raises:
        TransferCorrupt: wrong again.
        OSError: of the file.
    """
    with _PartFile(path, size) as file:
        fetched = [""] * file.count
        for again in (False, True):
            before = list(fetched)
            try:
                name = _bring(source, file, fetched, (lambda _: advance(0)) if again else advance)
            except ValueError as error:
                if again:
                    same = ", the same bytes" if fetched == before else ""
                    raise source.corrupt(f"{error}, fetched twice{same}") from error
                _log.warning("%s", source.corrupt(f"{error}: fetched once more"))
                file.forget()
                continue
            break
        file.flush()
        return Fetched(name, fetched)


def read_through(source: Source, size: int, take: Callable[[bytes], object]) -> str:
    """Gives the object's bytes to ``take``, in their order.

    Returns:
        How they were checked, as ``Fetched.checked``.

    Raises:
        TransferCorrupt: they are wrong: what ``take`` has is worth nothing.
    """
    check = source.check() if size > PIECE else None
    with _buffers.one(min(size, PIECE), _nothing) as buffer:
        for start in range(0, max(1, size), PIECE):
            part = buffer[: size - start]
            source.read(start, part, _nothing)
            check = check or source.check()  # of a small object: what its only answer says
            if check.digest:
                check.digest.update(part)
            for at in range(0, len(part), CHUNK):
                take(bytes(part[at : at + CHUNK]))
    assert check is not None
    try:
        return check.result()
    except ValueError as error:
        raise source.corrupt(str(error)) from error


def _nothing(_: int) -> None:
    """Nobody counts."""


def journal_of(path: Path) -> Path:
    """Where it is kept which parts of the file are there."""
    return path.with_name(f"{path.stem}.done.part")


def _bring(source: Source, file: _PartFile, fetched: list[str], advance: Advance) -> str:
    """Brings all parts and their digests. Raises ValueError if the whole is not right."""
    if file.count == 1:
        with _buffers.one(file.size, advance) as part:
            source.read(0, part, advance)
            fetched[0] = hashlib.sha256(part).hexdigest()
            file.write(0, part)
            check = source.check()
            if check.name == "sha256" and check.expected == fetched[0]:
                return check.name
            if check.digest:
                check.digest.update(part)
            return check.result()
    check = source.check()
    _Lanes(source, file, fetched, check, advance).run()
    return check.result()


class _Ended(Exception):
    """Ends a lane because another one has failed."""


class _Lanes:
    """Threads that bring the parts of one file.

    A part is begun only by who has memory for it, in their order. So the first that the digest of
    the whole waits for is always under way, and who waits for memory gets it.
    """

    def __init__(
        self, source: Source, file: _PartFile, fetched: list[str], check: Check, advance: Advance
    ) -> None:
        self._source, self._file, self._fetched = source, file, fetched
        self._digest, self._advance = check.digest, advance
        self._numbers = iter(range(file.count))
        self._failed = False
        self._lock = threading.Lock()
        self._came: dict[int, bytearray] = {}  # not yet in the digest of the whole
        self._next, self._digesting = 0, False

    def run(self) -> None:
        count = min(_AT_ONCE, self._file.count)
        try:
            with ThreadPoolExecutor(count, thread_name_prefix="ddl-transfer-part") as pool:
                lanes = [pool.submit(self._lane) for _ in range(count)]
                try:
                    errors = [lane.exception() for lane in lanes]
                except BaseException:  # a signal: no thread goes on alone
                    self._failed = True
                    raise
            for error in sorted(filter(None, errors), key=lambda one: isinstance(one, _Ended)):
                raise error
        finally:
            for buffer in self._came.values():
                _buffers.give(buffer)

    def _proceed(self, nbytes: int) -> None:
        if self._failed:
            raise _Ended
        self._advance(nbytes)

    def _lane(self) -> None:
        try:
            while self._bring_next():
                pass
        except BaseException:
            self._failed = True
            raise

    def _bring_next(self) -> bool:
        """Whether there was one."""
        buffer = _buffers.take(self._proceed)
        try:
            number = next(self._numbers, None)
            if number is not None:
                self._bring(number, self._file.of(number, buffer))
        except BaseException:
            _buffers.give(buffer)
            raise
        if number is None:
            _buffers.give(buffer)
            return False
        self._digest_in_turn(number, buffer)
        return True

    def _bring(self, number: int, part: memoryview) -> None:
        digest = self._file.restore(number, part)
        if digest:
            self._proceed(len(part))
        else:
            self._source.read(number * PIECE, part, self._proceed)
            digest = hashlib.sha256(part).hexdigest()
            self._file.write(number, part)
            self._file.note(number, digest)
        self._fetched[number] = digest

    def _digest_in_turn(self, number: int, buffer: bytearray) -> None:
        """Digests the parts whose turn it is, if no other lane does."""
        with self._lock:
            self._came[number] = buffer
            if self._digesting:
                return
            self._digesting = True
        while True:
            with self._lock:
                turn = self._next
                ready = self._came.pop(turn, None)
                if ready is None:
                    self._digesting = False
                    return
                self._next += 1
            try:
                if self._digest:
                    self._digest.update(self._file.of(turn, ready))
            finally:
                _buffers.give(ready)


class _PartFile:
    """A file of a known size, parts of which are there, and the journal that says which."""

    def __init__(self, path: Path, size: int) -> None:
        self.size, self.count = size, max(1, -(-size // PIECE))
        self._path, self._journal = path, -1
        self._there: dict[int, str] = {}

    def __enter__(self) -> _PartFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        if self.count == 1:
            self._file = os.open(self._path, flags | os.O_EXCL, 0o666)
            return self
        self._file = os.open(self._path, flags, 0o666)
        try:
            found = os.fstat(self._file).st_size
            self._journal = os.open(journal_of(self._path), flags | os.O_APPEND, 0o666)
            if found:
                self._there = _noted(self._journal)
            else:
                self.forget()
            os.ftruncate(self._file, self.size)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._file)
        if self._journal >= 0:
            os.close(self._journal)

    def of(self, number: int, buffer: bytearray) -> memoryview:
        """The bytes of a buffer that a part fills."""
        return memoryview(buffer)[: min(PIECE, self.size - number * PIECE)]

    def restore(self, number: int, part: memoryview) -> str:
        """Reads a part back. Returns its SHA-256; empty if it is not there, or not what it was."""
        noted = self._there.get(number)
        if noted is None:
            return ""
        at, start = 0, number * PIECE
        while at < len(part) and (count := os.preadv(self._file, [part[at:]], start + at)):
            at += count
        found = hashlib.sha256(part[:at]).hexdigest()
        return found if found == noted else ""

    def write(self, number: int, part: memoryview) -> None:
        at, start = 0, number * PIECE
        while at < len(part):
            at += os.pwrite(self._file, part[at : at + CHUNK], start + at)

    def note(self, number: int, digest: str) -> None:
        """Keeps that a part is there, for whoever goes on."""
        # Has the disk begin with it, so that all is not left for the end. Nothing that is not yet
        # on disk leaves memory by this.
        os.posix_fadvise(self._file, number * PIECE, PIECE, os.POSIX_FADV_DONTNEED)
        os.write(self._journal, f"{json.dumps([number, digest])}\n".encode())

    def forget(self) -> None:
        """Has all parts come again."""
        self._there.clear()
        if self._journal >= 0:
            os.ftruncate(self._journal, 0)

    def flush(self) -> None:
        os.fsync(self._file)


def _noted(journal: int) -> dict[int, str]:
    """Part -> SHA-256. What was cut off, or is of other parts, reads back as something else."""
    there: dict[int, str] = {}
    with open(journal, "rb", closefd=False) as lines:
        for line in lines:
            with suppress(ValueError, TypeError):
                number, digest = json.loads(line)
                there[number] = digest
    return there


class _Buffers:
    """Memory for parts, of all files together. What nobody uses any more is given back."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._left = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._free: list[bytearray] = []
        self._taken = 0

    def take(self, advance: Advance) -> bytearray:
        """One of ``PIECE`` bytes, waited for until ``advance`` raises."""
        while not self._left.acquire(timeout=_LOOK_S):
            advance(0)
        with self._lock:
            self._taken += 1
            if self._free:
                return self._free.pop()
        return bytearray(PIECE)

    def give(self, buffer: bytearray) -> None:
        with self._lock:
            self._taken -= 1
            self._free.append(buffer)
            if not self._taken:
                self._free.clear()
        self._left.release()

    @contextmanager
    def one(self, size: int, advance: Advance) -> Iterator[memoryview]:
        """Memory for an object of one part."""
        if size <= _SMALL:
            yield memoryview(bytearray(size))
            return
        buffer = self.take(advance)
        try:
            yield memoryview(buffer)[:size]
        finally:
            self.give(buffer)


_buffers = _Buffers(_AT_ONCE)

"""One object into one file: in parts, several at once, of which none that is there comes twice.

A part is a ``PIECE``, or what the store has as a part. Which ones are there is in a journal beside
the file: whoever goes on, after the process was killed, reads them back, and fetches what is
missing or is not what it was. Each byte is digested while it is in memory: once, where the digest
of the whole can be made of those of the parts; else for its piece by a CRC and, in the order of the
parts, for the whole.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from ddl_airflow.core.errors import StagingError, TransferCorrupt
from ddl_airflow.storage import checksums, lanes
from ddl_airflow.storage.checksums import CRCS, HASHES, OF_PIECES
from ddl_airflow.storage.fingerprint import Digest, of_parts
from ddl_airflow.storage.lanes import Lanes
from ddl_airflow.storage.store import CHUNK, PIECE, Advance, Fetched

_BLOCK = CHUNK  # of a part that is digested by itself: what fits the caches of a processor
_MOST_OF_A_PART = 64 * CHUNK  # what is lost of one that breaks off, times those at once
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
        part_size: bytes, where the digest can be made of those of such parts.
        sure: asked when there is such a difference: whether it is proof after all.
    """

    name: str
    digest: WholeDigest | None = None
    expected: str = ""
    proof: bool = True
    part_size: int = 0
    sure: Callable[[], bool] | None = None

    @property
    def algorithm(self) -> str:
        """Of the digest, or of those of parts; empty: there is none."""
        algorithm = self.name.removesuffix("-of-parts")
        return algorithm if algorithm in (*CRCS, *HASHES) else ""

    def of_parts(self, digests: Sequence[str], size: int) -> str:
        """The digest of so many bytes, made of those of their parts of ``part_size``."""
        parts = [*map(bytes.fromhex, digests)]
        if self.name != self.algorithm:
            return of_parts(self.algorithm, parts)
        sizes = [min(self.part_size, size - at) for at in range(0, size, self.part_size)]
        return checksums.joined(self.algorithm, parts, sizes).hex()

    def result(self, found: str = "") -> str:
        """The name; "size" if it could not decide. Raises ValueError on other content.

        Args:
            found: the digest; empty: what ``digest`` has.
        """
        if self.digest is None or (found := found or self.digest.hexdigest()) == self.expected:
            return self.name
        if self.proof and (self.sure is None or self.sure()):
            raise ValueError(f"{self.name} is {found}, not {self.expected}")
        return "size"

    def proved(self, result: str) -> dict[str, Any]:
        """``Fetched.proved``, once the digest gave that result."""
        if result == "sha256" or result in CRCS:
            return {result: self.expected}
        if result == "md5":
            return {"etag_is": "md5"}
        if result == "md5-of-parts" and self.part_size:
            return {"etag_is": "md5", "part_size": self.part_size}
        return {}


class RangesIgnored(StagingError):
    """The store sends all of an object where some of its bytes are asked for."""

    retryable = False


class Source(Protocol):
    """An object, in the version that was listed. Used by many threads."""

    def read(self, start: int, into: memoryview, advance: Advance) -> None:
        """Fills ``into`` with the bytes from ``start`` on, in as many tries as may help.

        Raises:
            RangesIgnored: only ``PartsSource.read_in_order`` can.
            StagingError: it could not.
        """

    def check(self) -> Check:
        """A new one for all bytes; asks the store, where nothing was read yet."""

    def corrupt(self, why: str) -> TransferCorrupt:
        """The error that names the object."""


class PartsSource(Source, Protocol):
    """A source whose ``check`` may have a part size, and whose store may ignore ranges."""

    def read_blocks(
        self,
        start: int,
        count: int,
        block: memoryview,
        take: Callable[[memoryview], None],
        advance: Advance,
    ) -> None:
        """Reads ``count`` bytes from ``start`` on, and gives them to ``take`` in their order.

        Args:
            start, count: bytes.
            block: memory for those that ``take`` has at a time.
            take: called with each byte once, in as many tries as may help.
            advance: as for ``ObjectStore.get``.

        Raises:
            As ``read``.
        """

    def read_in_order(
        self, into: memoryview, take: Callable[[int, memoryview], None], advance: Advance
    ) -> None:
        """Reads all bytes by one request, and gives them to ``take`` in parts of ``into``, with
        their numbers. What breaks off begins again, with part 0, as often as may help.
        """


def download(source: Source, size: int, path: Path, advance: Advance) -> Fetched:
    """Writes the object's bytes.

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
        fetched: list[str] = []
        for again in (False, True):
            before, fetched = fetched, []
            try:
                return _bring(source, file, fetched, (lambda _: advance(0)) if again else advance)
            except ValueError as error:
                if again:
                    same = ", the same bytes" if fetched == before else ""
                    raise source.corrupt(f"{error}, fetched twice{same}") from error
                _log.warning("%s", source.corrupt(f"{error}: fetched once more"))
                file.forget()
        raise AssertionError("no tries")


def read_through(source: Source, size: int, take: Callable[[bytes], object]) -> str:
    """Gives the object's bytes to ``take``, in their order.

    Returns:
        How they were checked, as ``Fetched.checked``.

    Raises:
        TransferCorrupt: they are wrong: what ``take`` has is worth nothing.
    """
    check = source.check() if size > PIECE else None
    with lanes.buffers.one(min(size, PIECE), _nothing) as buffer:
        for start in range(0, max(1, size), PIECE):
            part = buffer[: size - start]
            try:
                source.read(start, part, _nothing)
            except RangesIgnored:
                return _read_in_order(cast(PartsSource, source), buffer, take)
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


def _read_in_order(source: PartsSource, buffer: memoryview, take: Callable[[bytes], object]) -> str:
    check, given = source.check(), -1

    def give(number: int, part: memoryview) -> None:
        nonlocal given
        if number <= given:  # begun again: that has been given
            return
        given = number
        if check.digest:
            check.digest.update(part)
        for at in range(0, len(part), CHUNK):
            take(bytes(part[at : at + CHUNK]))

    source.read_in_order(buffer, give, _nothing)
    try:
        return check.result()
    except ValueError as error:
        raise source.corrupt(str(error)) from error


def _nothing(_: int) -> None:
    """Nobody counts."""


def journal_of(path: Path) -> Path:
    """Where it is kept which parts of the file are there."""
    return path.with_name(f"{path.stem}.done.part")


def _bring(source: Source, file: _PartFile, fetched: list[str], advance: Advance) -> Fetched:
    """Brings all parts; adds their digests to ``fetched``. Raises ValueError if it is not right."""
    if file.count == 1:
        return _bring_at_once(source, file, fetched, advance)
    check = source.check()
    try:
        if 0 < check.part_size <= _MOST_OF_A_PART:
            return _bring_in_parts(cast(PartsSource, source), file, check, fetched, advance)
        return _bring_in_lanes(source, file, check, fetched, advance)
    except RangesIgnored as ignored:
        _log.warning("%s It is fetched by one request, which takes longer", ignored)
        return _bring_in_order(cast(PartsSource, source), file, fetched, advance)


def _bring_at_once(
    source: Source, file: _PartFile, fetched: list[str], advance: Advance
) -> Fetched:
    with lanes.buffers.one(file.size, advance) as part:
        source.read(0, part, advance)
        check = source.check()
        algorithm = check.name if check.name == check.algorithm else OF_PIECES
        digest = checksums.hex_of(algorithm, part)
        fetched.append(digest)
        file.write(0, part)
        if check.name != algorithm:
            if check.digest:
                check.digest.update(part)
            digest = ""
        result = check.result(digest)
        return Fetched(result, fetched, algorithm, proved=check.proved(result))


def _bring_in_order(
    source: PartsSource, file: _PartFile, fetched: list[str], advance: Advance
) -> Fetched:
    check = source.check()
    counted: set[int] = set()
    fetched[:] = [""] * file.count

    def take(number: int, part: memoryview) -> None:
        nonlocal check
        if not number:
            check = source.check()
        fetched[number] = checksums.hex_of(OF_PIECES, part)
        file.write(number, part)
        if check.digest:
            check.digest.update(part)
        if number not in counted:
            counted.add(number)
            advance(len(part))

    with lanes.buffers.one(PIECE, advance) as buffer:
        source.read_in_order(buffer[:PIECE], take, lambda _: advance(0))
    result = check.result()
    return Fetched(result, fetched, OF_PIECES, PIECE, check.proved(result))


def _bring_in_lanes(
    source: Source, file: _PartFile, check: Check, fetched: list[str], advance: Advance
) -> Fetched:
    """One digest of all bytes, in their order: parts wait in memory for their turn."""
    fetched[:] = [""] * file.count

    def bring(number: int, part: memoryview, proceed: Advance) -> None:
        digest = file.restore(number, part)
        if digest:
            proceed(len(part))
        else:
            source.read(number * PIECE, part, proceed)
            digest = checksums.hex_of(OF_PIECES, part)
            file.write(number, part)
            file.note(number, digest)
        fetched[number] = digest

    Lanes(file.size, PIECE, bring, check.digest, advance).run()
    result = check.result()
    return Fetched(result, fetched, OF_PIECES, PIECE, check.proved(result))


def _bring_in_parts(
    source: PartsSource, file: _PartFile, check: Check, fetched: list[str], advance: Advance
) -> Fetched:
    """Parts that are digested each by itself, block by block, while it is in the cache of the
    processor: the store's own, or of a size of ours. Their digests are those that are kept.
    """
    size, algorithm = check.part_size, check.algorithm
    fetched[:] = [""] * -(-file.size // size)

    def bring(number: int, memory: memoryview, proceed: Advance) -> None:
        block, start = memory[:_BLOCK], number * size
        count = min(size, file.size - start)
        digest = file.restored(number, start, count, block, algorithm)
        if digest:
            proceed(count)
        else:
            digests, at = checksums.new(algorithm), start

            def take(part: memoryview) -> None:
                nonlocal at
                digests.update(part)
                file.write_at(at, part)
                at += len(part)

            source.read_blocks(start, count, block, take, proceed)
            digest = digests.hexdigest()
            file.note(number, digest)
        fetched[number] = digest

    Lanes(file.size, size, bring, None, advance, memory=_BLOCK).run()
    result = check.result(check.of_parts(fetched, file.size))
    return Fetched(result, fetched, algorithm, size, check.proved(result))


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

    def restore(self, number: int, part: memoryview) -> str:
        """Reads a piece back. Returns its digest; empty if it is not there, or not what it was."""
        noted = self._there.get(number)
        if noted is None:
            return ""
        at, start = 0, number * PIECE
        while at < len(part) and (count := os.preadv(self._file, [part[at:]], start + at)):
            at += count
        found = checksums.hex_of(OF_PIECES, part[:at])
        return found if found == noted else ""

    def restored(
        self, number: int, start: int, count: int, block: memoryview, algorithm: str
    ) -> str:
        """The same of a part, ``count`` bytes from ``start`` on, a block at a time."""
        noted = self._there.get(number)
        if noted is None:
            return ""
        digest, at = checksums.new(algorithm), 0
        while at < count and (n := os.preadv(self._file, [block[: count - at]], start + at)):
            digest.update(block[:n])
            at += n
        return noted if digest.hexdigest() == noted else ""

    def write(self, number: int, part: memoryview) -> None:
        self.write_at(number * PIECE, part)

    def write_at(self, start: int, part: memoryview) -> None:
        at = 0
        while at < len(part):
            at += os.pwrite(self._file, part[at : at + CHUNK], start + at)

    def note(self, number: int, digest: str) -> None:
        """Keeps that a part is there, for whoever goes on."""
        os.write(self._journal, f"{json.dumps([number, digest])}\n".encode())

    def forget(self) -> None:
        """Has all parts come again."""
        self._there.clear()
        if self._journal >= 0:
            os.ftruncate(self._journal, 0)


def _noted(journal: int) -> dict[int, str]:
    """Part -> its digest. What was cut off, or is of other parts, reads back as something else."""
    there: dict[int, str] = {}
    with open(journal, "rb", closefd=False) as lines:
        for line in lines:
            with suppress(ValueError, TypeError):
                number, digest = json.loads(line)
                there[number] = digest
    return there

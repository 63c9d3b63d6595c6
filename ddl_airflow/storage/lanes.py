"""Threads that bring the parts of one file, in or out, and the memory for them.

Each part is digested while it is in memory, in the order of the parts, for the whole. At most
``AT_ONCE`` are in memory, of all files of the process together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from ddl_airflow.storage.fingerprint import Digest
from ddl_airflow.storage.store import CHUNK, PIECE, Advance

AT_ONCE = 8  # parts in memory, and under way of one file
_SMALL = CHUNK  # files up to this size have memory of their own
_LOOK_S = 0.1


class _Ended(Exception):
    """Ends a lane because another one has failed."""


class Lanes:
    """Brings the parts of one file.

    A part is begun only by who has memory for it, in their order. So the first that the digest of
    the whole waits for is always under way, and who waits for memory gets it.

    Args:
        size: bytes of the file.
        part_size: bytes of each part, the last of which may be smaller.
        bring: has the number of a part, from 0, its memory, and what to call meanwhile; the bytes
            are there when it returns.
        digest: of the whole; None: nobody needs one.
        advance: as for ``ObjectStore.put``.
        at_once: parts.
        memory: bytes for each; less than a part: ``bring`` fills it again and again.
    """

    def __init__(
        self,
        size: int,
        part_size: int,
        bring: Callable[[int, memoryview, Advance], None],
        digest: Digest | None,
        advance: Advance,
        at_once: int = AT_ONCE,
        memory: int = 0,
    ) -> None:
        self._size, self._part_size, self._memory = size, part_size, memory or part_size
        self._count = max(1, -(-size // part_size))
        self._bring, self._digest, self._advance = bring, digest, advance
        self._at_once = min(at_once, self._count)
        self._numbers = iter(range(self._count))
        self._failed = False
        self._lock = threading.Lock()
        self._came: dict[int, bytearray] = {}  # not yet in the digest of the whole
        self._next, self._digesting = 0, False

    def run(self) -> None:
        """Returns when all are there. Raises the first error, when no thread is left."""
        try:
            with ThreadPoolExecutor(self._at_once, thread_name_prefix="ddl-transfer-part") as pool:
                lanes = [pool.submit(self._lane) for _ in range(self._at_once)]
                try:
                    errors = [lane.exception() for lane in lanes]
                except BaseException:  # a signal: no thread goes on alone
                    self._failed = True
                    raise
            for error in sorted(filter(None, errors), key=lambda one: isinstance(one, _Ended)):
                raise error
        finally:
            for buffer in self._came.values():
                buffers.give(buffer)

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
        buffer = buffers.take(self._proceed, self._memory)
        try:
            number = next(self._numbers, None)
            if number is not None:
                self._bring(number, self._part(number, buffer), self._proceed)
        except BaseException:
            buffers.give(buffer)
            raise
        if number is None:
            buffers.give(buffer)
            return False
        self._digest_in_turn(number, buffer)
        return True

    def _part(self, number: int, buffer: bytearray) -> memoryview:
        """The bytes of a buffer that a part fills."""
        return memoryview(buffer)[: min(self._part_size, self._size - number * self._part_size)]

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
                    self._digest.update(self._part(turn, ready))
            finally:
                buffers.give(ready)


class Buffers:
    """Memory for parts, of all files together. What nobody uses any more is given back."""

    def __init__(self, count: int) -> None:
        self._left = threading.BoundedSemaphore(count)
        self._lock = threading.Lock()
        self._free: list[bytearray] = []
        self._taken = 0

    def take(self, advance: Advance, nbytes: int = PIECE) -> bytearray:
        """One of so many bytes, waited for until ``advance`` raises."""
        while not self._left.acquire(timeout=_LOOK_S):
            advance(0)
        with self._lock:
            self._taken += 1
            if self._free and nbytes == PIECE:
                return self._free.pop()
        return bytearray(nbytes)

    def give(self, buffer: bytearray) -> None:
        """For the next one."""
        with self._lock:
            self._taken -= 1
            if len(buffer) == PIECE:
                self._free.append(buffer)
            if not self._taken:
                self._free.clear()
        self._left.release()

    @contextmanager
    def one(self, size: int, advance: Advance) -> Iterator[memoryview]:
        """Memory for a file of one part."""
        if size <= _SMALL:
            yield memoryview(bytearray(size))
            return
        buffer = self.take(advance)
        try:
            yield memoryview(buffer)[:size]
        finally:
            self.give(buffer)


buffers = Buffers(AT_ONCE)

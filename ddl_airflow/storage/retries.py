"""How often a request to a store is made again, and when."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from ddl_airflow.core.errors import StagingError, TransferCorrupt
from ddl_airflow.storage.store import Advance

TRIES = 6  # to read one range, or to store one part
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 5.0
_MOST_RETRIES = 64
_LOOK_S = 0.1
_JITTER = random.SystemRandom()


class Retries:
    """How many more tries there are for all objects of a store: each range that comes, and each
    part that is stored, adds one.

    So a store that fails now and then is used on for hours, and one that mostly fails is not.
    """

    def __init__(self, most: int = _MOST_RETRIES) -> None:
        self._most = self._left = most
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Whether there was one left."""
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def came(self) -> None:
        """A range has come, or gone."""
        with self._lock:
            self._left = min(max(self._left, 0) + 1, self._most)

    def tried(self, call: Callable[[], None], advance: Advance, came: Callable[[], str]) -> None:
        """Makes the call, again after failures that may pass.

        Args:
            call: one try, which goes on where the last one broke off.
            advance: as for ``ObjectStore.get``.
            came: what to say of how far it got.

        Raises:
            StagingError: what cannot pass, or the last failure.
        """
        for number in range(1, TRIES + 1):
            try:
                call()
            except StagingError as error:
                advance(0)  # raises if this was no failure, but somebody's wish to stop
                if not error.retryable or isinstance(error, TransferCorrupt):
                    raise
                if number == TRIES or not self.take():
                    said = f"{str(error).rstrip('.')}. {came()}, in {number} tries."
                    raise StagingError(said) from error
                wait(number, advance)
            else:
                self.came()
                return


def wait(number: int, advance: Advance) -> None:
    """Longer after each try, and never as long as others do."""
    wait_s = min(_FIRST_WAIT_S * 2 ** (number - 1), _LONGEST_WAIT_S) * _JITTER.uniform(0.5, 1.0)
    end = time.monotonic() + wait_s
    while (left := end - time.monotonic()) > 0:
        advance(0)
        time.sleep(min(left, _LOOK_S))

"""A dataset that comes while others already read it: ``stage`` in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ddl_airflow.core.errors import SourceMissing, StagingError, TransferCorrupt
from ddl_airflow.core.selection import ALL, Selection
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.staging import Listing, StagedDataset, list_dataset, say_failed, stage
from ddl_airflow.storage.store import ObjectStore
from ddl_airflow.storage.transfer import Progress

_log = logging.getLogger(__name__)
_LOOK_S = 0.1


class _Stopped(Exception):
    """Nobody wants the rest any more."""


class Stream:
    """Brings a dataset into a folder that is there from its first file on.

    In a ``with`` statement, at whose end nothing of it goes on. What ends it is raised by each call
    from then on, and is told to who waits in the folder.

    Args:
        store, cache, destination, listing, closed_cache, workers, progress: as ``stage`` has them.
        selection: by which the listing was made.
    """

    def __init__(
        self,
        store: ObjectStore,
        cache: Cache,
        destination: Path,
        listing: Listing,
        *,
        selection: Selection = ALL,
        closed_cache: bool = False,
        workers: int = 8,
        progress: Progress = lambda *_: None,
    ) -> None:
        self._store, self._cache, self._destination = store, cache, destination
        self._listing, self._selection = listing, selection
        self._closed_cache, self._workers = closed_cache, workers
        self._progress = progress
        self._error: BaseException | None = None
        self._done: StagedDataset | None = None
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="ddl-stream")
        self.count = 0
        self.was_whole = False

    @property
    def total(self) -> int:
        """Files in all; ``count`` are there."""
        return len(self._listing.objects)

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop = True
        self._thread.join()

    def ready(self) -> bool:
        """Whether a first file is there; notes in ``was_whole`` whether all are.

        Raises:
            StagingError: no more come.
        """
        self.check()
        self.was_whole = self.count == self.total
        return self.count > 0

    def check(self) -> None:
        """Raises StagingError if no more come."""
        if self._error is not None:
            raise self._error

    def finish(self, go_on: Callable[[], bool] = lambda: True) -> StagedDataset | None:
        """Waits until all are there.

        Args:
            go_on: asked meanwhile; False ends the wait.

        Returns:
            As ``stage``; None: the wait was ended.

        Raises:
            StagingError: some never come.
        """
        while self._thread.is_alive() and go_on():
            self._thread.join(_LOOK_S)
        self.check()
        return self._done

    def _run(self) -> None:
        try:
            self._done = stage(
                self._store,
                self._cache,
                self._destination,
                listing=self._listing,
                closed_cache=self._closed_cache,
                workers=self._workers,
                progress=self._advance,
                arrived=self._arrived,
            )
        except _Stopped:
            pass
        except BaseException as error:  # whatever it is, the thread that waits raises it
            self._error = self._explained(error)
            self._tell(self._error)

    def _advance(self, done_bytes: int, total_bytes: int, done: int, total: int) -> None:
        if self._stop:
            raise _Stopped
        self._progress(done_bytes, total_bytes, done, total)

    def _arrived(self, count: int) -> None:
        self.count = count

    def _explained(self, error: BaseException) -> BaseException:
        """The error; where the data have changed, one that says so: no other try can mend it."""
        if not isinstance(error, (SourceMissing, TransferCorrupt)):
            return error
        try:
            now = list_dataset(self._store, self._selection).objects
        except StagingError as unlisted:
            now = [] if isinstance(unlisted, SourceMissing) else self._listing.objects
        other = sorted({*self._listing.objects} - {*now})
        if not other:
            return error
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        explained = type(error)(
            f"{error} {self._store.uri}: {other[0].key}{more} changed, or went, after stage_data "
            "had listed the data. Clear stage_data with downstream, to train with them as they "
            "are.",
            retryable=False,
        )
        explained.__cause__ = error
        return explained

    def _tell(self, error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}"
        with suppress(SourceMissing):  # no folder yet, so nobody waits in it
            try:
                say_failed(self._destination, why, closed_cache=self._closed_cache)
            except (
                StagingError
            ) as untold:  # the disk may be full; who started the readers ends them
                _log.warning("%s", untold)

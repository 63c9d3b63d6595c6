"""Many transfers at once: one count of what has come, and the first error ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from ddl_airflow.core.errors import StagingError

# done_bytes, total_bytes, done_files, total_files; called from any thread, one call at a time.
Progress = Callable[[int, int, int, int], None]

REPORT_INTERVAL_S = 0.25
Job = TypeVar("Job")


class _Stopped(StagingError):
    """Ends a transfer because another one failed; the other's error is the one to raise."""


class Meter:
    """Counts bytes and files of all threads, reports now and then, and stops them all.

    Args:
        progress: gets the report; None: nobody does.
        nbytes, files: of all transfers.

    Attributes:
        stopped: whether nothing more is to come.
    """

    def __init__(self, progress: Progress | None, nbytes: int, files: int) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._done, self._nbytes, self._done_files, self._files = 0, nbytes, 0, files
        self._next_report = 0.0
        self.stopped = False

    def advance(self, nbytes: int, files: int = 0) -> None:
        """Counts so much more. Raises ``StagingError`` once all are stopped."""
        if self.stopped:
            raise _Stopped("stopped because another transfer failed")
        with self._lock:
            self._done += nbytes
            self._done_files += files
            end = self._done_files == self._files
            if self._progress and (end or time.monotonic() >= self._next_report):
                self._next_report = time.monotonic() + REPORT_INTERVAL_S
                done = min(self._done, self._nbytes)  # what is fetched twice counts once
                self._progress(done, self._nbytes, self._done_files, self._files)


def for_each(jobs: Iterable[Job], work: Callable[[Job], None], workers: int, meter: Meter) -> None:
    """Runs ``work`` on all jobs in threads. The first error stops the others and is raised."""
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="ddl-transfer") as pool:
        running = [pool.submit(work, job) for job in jobs]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:  # also a signal that ends the task: no thread goes on alone
            meter.stopped = True
            pool.shutdown(wait=True, cancel_futures=True)
            raise

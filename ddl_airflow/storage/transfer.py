"""Many transfers at once: one count of what has come, and the first error ends all."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

from ddl_airflow.core.errors import StagingError

# done_bytes, total_bytes, done_files, total_files; called from any thread, one call at a time.
Progress = Callable[[int, int, int, int], None]

REPORT_INTERVAL_S = 0.25
_AT_FIRST = 2  # transfers at once
_LOOK_S = 0.1  # until it is asked whether more gain something
_BUSY = 0.7  # of the time, one thread computes
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
    """Runs ``work`` on all jobs in threads, which begin in their order. The first error stops the
    others and is raised.

    A few run at once at first, and twice as many as long as that gains something, up to
    ``workers``. Where answers come fast, all that more threads do is take Python's lock from one
    another: from a store on the same host eight take half as long again as two.
    """
    workers, waiting = max(1, workers), deque(jobs)
    at_once = min(_AT_FIRST, workers)
    turns = threading.Semaphore(at_once)

    def in_turn() -> None:
        with turns:
            meter.advance(0)  # raises once another one has failed
            # Not before it is its turn, which those that have just ended are the first to take.
            work(waiting.popleft())

    with ThreadPoolExecutor(workers, thread_name_prefix="ddl-transfer") as pool:
        running = [pool.submit(in_turn) for _ in range(len(waiting))]
        try:
            look_s, left = _LOOK_S, True
            while at_once < workers and left:
                cpu_s, began = time.process_time(), time.monotonic()
                done, others = wait(running, look_s, FIRST_EXCEPTION)
                left = bool(others) and not any(one.exception() for one in done)
                if _gains(time.process_time() - cpu_s, time.monotonic() - began, at_once):
                    more = min(at_once, workers - at_once)
                    turns.release(more)
                    at_once += more
                else:
                    look_s *= 2  # each look asks all jobs
            for future in as_completed(running):
                future.result()
        except BaseException:  # also a signal that ends the task: no thread goes on alone
            meter.stopped = True
            turns.release(workers)
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _gains(cpu_s: float, wall_s: float, at_once: int) -> bool:
    """Whether more transfers at once would take less time.

    Args:
        cpu_s, wall_s: what this process used while so much time passed.
        at_once: transfers meanwhile.
    """
    busy = cpu_s / wall_s  # threads that computed, on average
    # Else one computes at nearly all times, and others wait for Python's lock or for a core.
    return busy < _BUSY or busy > _BUSY * at_once

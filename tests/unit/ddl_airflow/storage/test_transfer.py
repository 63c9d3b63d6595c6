"""Transfers: how many at once, and that the first error ends all."""

from __future__ import annotations

import threading
import time

import pytest

from ddl_airflow.core.errors import StagingError
from ddl_airflow.storage import transfer
from ddl_airflow.storage.transfer import Meter, for_each
from tests.limits import within

WORKERS = 8


def test_transfers_that_wait_for_the_network_run_all_at_once():
    together = threading.Barrier(WORKERS)  # passed by so many at once alone

    for_each(range(WORKERS), lambda _: together.wait(within(60)), WORKERS, Meter(None, 0, 0))


def test_transfers_that_hold_pythons_lock_stay_few(monkeypatch):
    monkeypatch.setattr(transfer, "_gains", lambda cpu_s, wall_s, at_once: False)
    running, most, lock = 0, 0, threading.Lock()

    def work(_: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    for_each(range(60), work, WORKERS, Meter(None, 0, 0))

    assert most == transfer._AT_FIRST


def test_they_begin_in_their_order_however_few_run_at_once(monkeypatch):
    """A stream's files come into their folder in that order."""
    monkeypatch.setattr(transfer, "_gains", lambda cpu_s, wall_s, at_once: False)
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        time.sleep(0.001)

    for_each(range(200), work, WORKERS, Meter(None, 0, 0))

    assert max(abs(number - at) for at, number in enumerate(begun)) < WORKERS


@pytest.mark.parametrize(
    ("cpu_s", "at_once", "gains"),
    [
        pytest.param(0.01, 2, True, id="all wait for answers"),
        pytest.param(0.10, 2, False, id="one computes while the other waits for Python's lock"),
        pytest.param(0.20, 2, True, id="both compute at once, as digests do"),
        pytest.param(0.20, 4, False, id="half of them wait for a core or for the lock"),
    ],
)
def test_more_at_once_help_those_that_wait_and_those_that_need_no_lock(cpu_s, at_once, gains):
    assert transfer._gains(cpu_s, 0.1, at_once) is gains


@pytest.mark.parametrize("workers", [0, 1, 2, WORKERS])
def test_each_is_done_once_with_any_number_of_workers(workers):
    done: list[int] = []

    for_each(range(100), done.append, workers, Meter(None, 0, 0))

    assert sorted(done) == [*range(100)]


def test_the_first_error_ends_all_and_begins_none():
    begun: list[int] = []
    meter = Meter(None, 0, 0)

    def work(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise StagingError("no such bucket")
        while True:
            meter.advance(0)
            time.sleep(0.001)

    with pytest.raises(StagingError, match="no such bucket"):
        for_each(range(100), work, WORKERS, meter)

    assert len(begun) <= WORKERS

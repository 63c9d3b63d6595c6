"""How long tests wait for what must have happened by then: as long as this machine takes.

Limits are written for an idle machine of two processors. ``within`` makes them longer where this
one is slower: by what a short piece of work took when the session began, or by how many processes
want each processor at the moment, whichever is more. It is for upper bounds of the tests only: the
product's own limits (``DDL_STALL_TIMEOUT``, ...) that a test sets are what they say, and where
ranks must do something meanwhile, the test sets them by ``within``, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddl_airflow.demo.site import AirflowSite

# How much slower than it the machine is; scripts that tests start read it (``slowness``).
VARIABLE = "TESTS_SLOWNESS"
MOST = 6.0
# What _work takes on an idle machine of two processors: 0.16 to 0.18 s, and 0.33 to 0.36 s where
# others share the processors of its host.
_IDLE_S = 0.17
_WORK = "sum(number * number for number in range(2_000_000))"


def calibrate() -> None:
    """Measures once for this session and all processes that it starts."""
    os.environ.setdefault(VARIABLE, f"{_kept(_work() / _IDLE_S):.2f}")


def slowness() -> float:
    """How many times the time of an idle machine things take here now; from 1 to ``MOST``."""
    waiting = os.getloadavg()[0] / (os.cpu_count() or 1)
    return _kept(max(float(os.environ.get(VARIABLE, "1")), waiting))


def within(limit_s: float) -> float:
    """The limit, longer on a machine that is slower.

    Args:
        limit_s: in seconds, or in milliseconds, on an idle machine of two processors.
    """
    return limit_s * slowness()


def until(
    holds: Callable[[], object], limit_s: float, said: Callable[[], object] = lambda: ""
) -> None:
    """Waits until something holds.

    Args:
        holds: what.
        limit_s: for ``within``.
        said: what the error shows.

    Raises:
        AssertionError: it did not hold within the time.
    """
    began = time.monotonic()
    while not holds():
        # Asked again: the machine may have become busy since.
        assert time.monotonic() - began < within(limit_s), f"not within {limit_s} s: {said()}"
        time.sleep(0.005)


def output(process: subprocess.Popen[str], limit_s: float) -> tuple[str, str]:
    """Waits until a process with pipes has ended.

    Args:
        process: it. What does not end in time is ended, so that nothing of it is left.
        limit_s: for ``within``.

    Returns:
        What it has written to its output, and to its errors.

    Raises:
        AssertionError: it did not end within the time. Shows what it has written.
    """
    try:
        return process.communicate(timeout=within(limit_s))
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        out, err = process.communicate(timeout=within(20))
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    raise AssertionError(f"not within {limit_s} s: {out}{err}")


class PatientSite(AirflowSite):
    """Airflow, which is waited for as long as this machine takes, and takes less of it."""

    def _settings(self, dags: Path, bundles: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        # Looking more often keeps a processor from the tests beside.
        idle = {"AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5"}
        return super()._settings(dags, bundles) | idle

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        super()._wait(done, within(timeout_s))


def _work() -> float:
    """Seconds for two Pythons at once, each to start and to compute."""
    began = time.monotonic()
    both = [subprocess.Popen([sys.executable, "-SEc", _WORK]) for _ in range(2)]
    for one in both:
        one.wait()
    return time.monotonic() - began


def _kept(factor: float) -> float:
    return min(max(factor, 1.0), MOST)

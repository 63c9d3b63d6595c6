"""Limits of tests that follow the machine."""

from __future__ import annotations

import os

import pytest

from tests.limits import MOST, VARIABLE, until, within


@pytest.mark.parametrize(
    ("measured", "waiting", "factor"),
    [("1", 0.0, 1), ("2.5", 0.0, 2.5), ("1", 2.0, 2), ("2.5", 2.0, 2.5), ("1", 99.0, MOST)],
)
def test_limits_are_as_long_as_the_machine_takes(monkeypatch, measured, waiting, factor) -> None:
    monkeypatch.setenv(VARIABLE, measured)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (2 * waiting, 0.0, 0.0))
    assert within(30) == 30 * factor


def test_what_does_not_hold_in_time_is_said() -> None:
    until(lambda: True, 0.01)
    with pytest.raises(AssertionError, match="not within 0.01 s: nobody came"):
        until(lambda: False, 0.01, lambda: "nobody came")

"""Durations and sizes as people write them, read exactly: ``"5m"``, ``"1.5h"``, ``"500Gi"``."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

_UNITS_US = {
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
# Longer ones Airflow cannot add to a date: its scheduler would come to no decision about the run.
_LONGEST = timedelta(days=36_500)
_UNITS_BYTES = {"B": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# Fifteen digits are enough for anything real, and keep hostile input cheap.
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]+)")


def parse_duration(text: str) -> timedelta:
    """Returns the duration, exact to the microsecond.

    Args:
        text: a number and one of ms, s, m, h, d, such as ``30s`` or ``1.5h``.

    Raises:
        ValueError: no number, no or unknown unit, finer than a microsecond, or too long.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS_US:
        units = ", ".join(_UNITS_US)
        raise ValueError(f"{text[:40]!r} is not a duration: a number and one of {units}")
    exact = Fraction(match[1]) * _UNITS_US[match[2]]
    if exact.denominator != 1:
        raise ValueError(f"{text!r} is finer than a microsecond")
    if exact.numerator > _LONGEST / timedelta(microseconds=1):
        raise ValueError(f"{text!r} is too long for a duration: at most {_LONGEST.days}d")
    return timedelta(microseconds=exact.numerator)


def parse_size(text: str) -> int:
    """Returns bytes.

    Args:
        text: a number and one of B, Ki, Mi, Gi, Ti, such as ``500Gi``.

    Raises:
        ValueError: no number, or no or unknown unit.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS_BYTES:
        units = ", ".join(_UNITS_BYTES)
        raise ValueError(f"{text[:40]!r} is not a size: a number and one of {units}")
    return int(Fraction(match[1]) * _UNITS_BYTES[match[2]])

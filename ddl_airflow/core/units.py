"""Durations and sizes as people write them, read exactly: ``"5m"``, ``"1.5h"``, ``"4Gi"``."""

from __future__ import annotations

import re
from datetime import timedelta
from fractions import Fraction

_DURATIONS_US = {
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_SIZES = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
    **{f"{letter}i": 1024**power for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
}
# Fifteen digits are enough for anything real, and keep hostile input cheap.
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]+)")


def parse_duration(text: str) -> timedelta:
    """Returns the duration, exact to the microsecond.

    Args:
        text: a number and one of ms, s, m, h, d, such as ``30s`` or ``1.5h``.

    Raises:
        ValueError: no number, no or unknown unit, finer than a microsecond, or too long.
    """
    microseconds = _quantity(text, _DURATIONS_US, "duration", "a microsecond")
    try:
        return timedelta(microseconds=microseconds)
    except OverflowError:
        raise ValueError(f"{text!r} is too long for a duration") from None


def parse_size(text: str) -> int:
    """Returns the size in bytes.

    Args:
        text: a number and a unit: B; kB, MB, GB, TB (powers of 1000); Ki, Mi, Gi, Ti or KiB,
            MiB, GiB, TiB (powers of 1024).

    Raises:
        ValueError: no number, no or unknown unit, or not a whole number of bytes.
    """
    return _quantity(text, _SIZES, "size", "one byte")


def _quantity(text: str, units: dict[str, int], kind: str, finest: str) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"{text[:40]!r} is not a {kind}: a number and one of {', '.join(units)}")
    exact = Fraction(match[1]) * units[match[2]]
    if exact.denominator != 1:
        raise ValueError(f"{text!r} is finer than {finest}")
    return exact.numerator

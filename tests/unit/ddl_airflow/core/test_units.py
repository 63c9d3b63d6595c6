from __future__ import annotations

from datetime import timedelta

import pytest

from ddl_airflow.core.units import parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("5m", 300), ("1h", 3600), ("2d", 172_800), ("250ms", 0.25), ("1.5 h", 5400)]
    + [(" 0s ", 0), ("0.1s", 0.1), ("0.000001s", 0.000001)]
    + [("36500d", 3_153_600_000)],
)
def test_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    ["", "30", "s", "-1s", "1 week", "1S", "1M", "1h30m", "0.0000001s", "1e3s", "999999999999999d"]
    + ["٣s", "1" * 5000 + "s", "1.s", ".5s", "36500.1d", "99999999d"],
)
def test_duration_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(ValueError, match="duration|finer"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "nbytes"), [("500Gi", 500 * 2**30), ("1.5 Ki", 1536), ("0B", 0)])
def test_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "500", "500G", "1GiB", "-1Gi", "5m"])
def test_size_refuses_what_it_does_not_know(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: a number and one of B, Ki"):
        parse_size(text)

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.collectives.cost import SIZES, draw, law, table

COUNTS = [2, 4, 8]


def costs(exponent: float) -> dict[tuple[int, int], float]:
    return {(nbytes, ranks): 0.5 * law(ranks) ** exponent for nbytes in SIZES for ranks in COUNTS}


def test_law_is_the_bytes_that_a_rank_must_receive() -> None:
    assert [law(ranks) for ranks in (1, 2, 4, 8)] == [0, 1, 1.5, 1.75]


def test_measured_points_that_obey_the_law_lie_on_its_line() -> None:
    svg = ElementTree.fromstring(draw(costs(1), costs(1), COUNTS))
    name = "{http://www.w3.org/2000/svg}"
    circles = svg.findall(f"{name}circle")
    assert len(circles) == 4 * len(COUNTS)
    paths = [path.get("d") for path in svg.findall(f"{name}path") if path.get("stroke-dasharray")]
    bound = [tuple(map(float, pair.split())) for pair in paths[0].lstrip("M").split("L")]
    for circle in circles:
        x, y = float(circle.get("cx")), float(circle.get("cy"))
        nearest = min(bound, key=lambda point: abs(point[0] - x))
        assert nearest == pytest.approx((x, y), abs=0.11)


def test_table_gives_multiples_of_the_fewest_ranks() -> None:
    lines = table(costs(1), costs(2), COUNTS).splitlines()
    assert lines[3] == "| 16 MiB | 4 | 1.50 | 0.750 | 1.50 | 1.125 | 2.25 |"

"""What a metric was at many steps, in as many points as can be drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

# A step, and what a metric was after it.
Point = tuple[int, float]


def downsampled(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about so many of them, which look the same: of each stretch the first, the last,
    the least and the greatest, and one of those that are no number. Points are in order of step.

    So a spike of one step is always drawn, which a mean or each n-th point would lose.
    """
    if len(points) <= limit:
        return list(points)
    stretches = max(1, limit // 5)
    drawn: list[Point] = []
    for number in range(stretches):
        begin = number * len(points) // stretches
        end = (number + 1) * len(points) // stretches
        stretch = range(begin, end)
        kept = {begin, end - 1}
        finite = [index for index in stretch if math.isfinite(points[index][1])]
        if finite:
            kept.add(min(finite, key=lambda index: points[index][1]))
            kept.add(max(finite, key=lambda index: points[index][1]))
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if not math.isfinite(points[index][1])))
        drawn += [points[index] for index in sorted(kept)]
    return drawn

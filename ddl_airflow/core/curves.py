"""What a metric was at many steps, in as many points as can be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

# A step, and what a metric was after it.
Point = tuple[int, float]


def downsampled(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about so many of them, which look the same: of each stretch the first, the last,
    the least and the greatest, and one of those that are no number. Points are in order of step.

    So a spike of one step is always drawn, which a mean or each n-th point would lose.
    """
    if len(points) <= limit:
        return list(points)
    drawn: list[Point] = []
    for stretch in _stretches(points, limit):
        kept = {stretch[0], stretch[-1]}
        finite = [index for index in stretch if math.isfinite(points[index][1])]
        if finite:
            kept.add(min(finite, key=lambda index: points[index][1]))
            kept.add(max(finite, key=lambda index: points[index][1]))
        if len(finite) < len(stretch):
            kept.add(next(index for index in stretch if not math.isfinite(points[index][1])))
        drawn += [points[index] for index in sorted(kept)]
    return drawn


def averaged(points: Sequence[Point], limit: int) -> list[Point]:
    """The mean of each stretch that ``downsampled`` makes of so many, at its last step; NaN where
    it has no number.

    What is to be smoothed is this: a spike of one step is drawn as long as all others of its
    stretch, and is no more than one of them.
    """
    means: list[Point] = []
    for stretch in _stretches(points, limit):
        within = points[stretch.start : stretch.stop]
        finite = [value for _, value in within if math.isfinite(value)]
        # Each is divided first: their sum may be beyond what a number can be.
        mean = sum(value / len(finite) for value in finite) if finite else math.nan
        means.append((within[-1][0], mean))
    return means


def _stretches(points: Sequence[Point], limit: int) -> Iterator[range]:
    """Of as many points each, but for one: so many that five points of each are no more than the
    limit.
    """
    count = max(1, limit // 5)
    for number in range(count):
        yield range(number * len(points) // count, (number + 1) * len(points) // count)

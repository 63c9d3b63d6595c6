"""What a training told while it ran, as a picture that needs no script and no server: SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from xml.sax.saxutils import escape

from ddl_airflow.core.curves import downsampled
from ddl_airflow.core.metrics import Measurement, is_word, shown, source_of
from ddl_airflow.core.progress import ABOUT_RUN, read_line
from ddl_airflow.evidence.names import plain

# Of one picture: a script may report as many metrics as it likes.
_MOST_CURVES = 12
_MOST_READ = 1_000
_MOST_POINTS = 400
_LONGEST_NAME = 48
_WIDTH, _HEIGHT, _COLUMNS = 380, 190, 2
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 26


class Curves(NamedTuple):
    """What was told of each metric.

    Attributes:
        values: by step, of each name and what it was measured on.
        by: what the steps are: ``step``, or ``epoch`` where no step was told.
    """

    values: Mapping[tuple[str, str], Mapping[int, float]]
    by: str = "step"


def read_curves(lines: Iterable[str]) -> Curves:
    """Each metric's values by step.

    A step that was done again, by a later try, counts as it was last. A line without a step belongs
    to the last that was told. Epochs stand for steps where a script tells only these, as Keras's
    own lines do. What is no number, or not finite, is left out, and so are metrics after the first
    thousand.

    Args:
        lines: of ``progress.jsonl``; those that are no progress are passed over.
    """
    curves: dict[tuple[str, str], dict[int, float]] = {}
    step, by = 0, ""
    for line in lines:
        fields = read_line(line)
        if fields is None:
            continue
        source, said = fields.get("source"), fields.get("step")
        if isinstance(said, (int, float)) and source != "ops":  # those count from each try's start
            step, by = int(said), "step"
        elif by != "step" and isinstance(epoch := fields.get("epoch"), (int, float)):
            step, by = int(epoch), "epoch"
        for name, value in fields.items():
            if name in ABOUT_RUN or isinstance(value, str) or is_word(value):
                continue
            if math.isfinite(value):
                of = source_of(name, source if isinstance(source, str) else None)
                if (name, of) in curves or len(curves) < _MOST_READ:
                    curves.setdefault((name, of), {})[step] = float(value)
    return Curves(curves, by or "step")


def drawn(curves: Curves) -> str:
    """The picture: a small chart for each metric with two values or more; empty for none.

    Names are whatever a script chose: they are text in it and nothing else.
    """
    known = [(name, by_step) for name, by_step in sorted(curves.values.items()) if len(by_step) > 1]
    if not known:
        return ""
    left_out = len(known) - _MOST_CURVES
    known = known[:_MOST_CURVES]
    rows = math.ceil(len(known) / _COLUMNS)
    columns = min(len(known), _COLUMNS)
    width, height = columns * _WIDTH, rows * _HEIGHT + (20 if left_out > 0 else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="11">',
        f"<title>{escape(', '.join(_called(name) for name, _ in known))}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, by_step) in enumerate(known):
        x, y = number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_chart(name, by_step, curves.by), "</g>"]
    if left_out > 0:
        parts.append(f'<text x="8" y="{height - 6}" fill="#444444">and {left_out} more</text>')
    return "\n".join([*parts, "</svg>", ""])


def _chart(name: tuple[str, str], by_step: Mapping[int, float], by: str) -> Iterable[str]:
    points = downsampled(sorted(by_step.items()), _MOST_POINTS)
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def across(step: float) -> float:
        return _LEFT + (right - _LEFT) * (step - steps[0]) / max(steps[-1] - steps[0], 1)

    def down(value: float) -> float:
        # In halves: the distance of two numbers may be more than there are.
        span = high / 2 - low / 2
        share = (value / 2 - low / 2) / span if span else 0.5
        return bottom - (bottom - _TOP) * share

    line = " ".join(f"{across(step):.1f},{down(value):.1f}" for step, value in points)
    yield f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(_called(name))}</text>'
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#888888"/>'
    for value, y in {high: _TOP + 4, low: bottom}.items():
        said = shown(value, 4)
        yield f'<text x="{_LEFT - 6}" y="{y}" text-anchor="end" fill="#444444">{said}</text>'
    yield f'<text x="{_LEFT}" y="{bottom + 16}" fill="#444444">{by} {steps[0]}</text>'
    yield (
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end" fill="#444444">{steps[-1]}</text>'
    )
    yield f'<polyline points="{line}" fill="none" stroke="#0b6bcb" stroke-width="1.5"/>'


def _called(name: tuple[str, str]) -> str:
    metric, source = name
    text = plain(metric)
    short = text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 1] + "…"
    return f"{short} ({Measurement(metric, 0.0, source).measured_on})"

"""Measured allreduces over what the model says of them, as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.scaling.compared import Row, ranks_text

_COLOURS = {"none": "#555555", "1gbit": "#1b6ca8", "100mbit": "#e07a1f"}
_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 40, 460, 380


def draw(rows: Sequence[Row]) -> str:
    """Points on logarithmic axes: on the line the model is right. Hollow: it was fitted on them."""
    shown = [row for row in rows if row.case.kind == "allreduce" and row.case.layout.hosts > 1]
    values = [value for row in shown for value in (row.case.seconds, row.predicted_s)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x_of(seconds: float) -> float:
        return _LEFT + _WIDTH * (math.log10(seconds) - low) / (high - low)

    def y_of(seconds: float) -> float:
        return _TOP + _HEIGHT * (1 - (math.log10(seconds) - low) / (high - low))

    right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + 190}" height="{bottom + 56}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22">Seconds of an allreduce between hosts: measured, over the '
        "model</text>",
    ]
    for power in range(low, high + 1):
        label = f"{10**power:g} s"
        x, y = x_of(10**power), y_of(10**power)
        out.append(f'<path d="M{x:.1f} {_TOP}V{bottom}M{_LEFT} {y:.1f}H{right}" stroke="#dddddd"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{label}</text>')
        out.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    out.append(f'<path d="M{_LEFT} {bottom}L{right} {_TOP}" stroke="#555555" fill="none"/>')
    out.append(
        f'<text x="{_LEFT + _WIDTH / 2}" y="{bottom + 44}" text-anchor="middle">model</text>'
    )
    for row in shown:
        colour = _COLOURS.get(row.case.rate, "#a63c06")
        fill = "white" if row.fitted else colour
        said = f"{row.case.rate}, {ranks_text(row.case.layout)}, {row.case.nbytes} B"
        out.append(
            f'<circle cx="{x_of(row.predicted_s):.1f}" cy="{y_of(row.case.seconds):.1f}" r="4" '
            f'fill="{fill}" stroke="{colour}" stroke-width="1.5" fill-opacity="0.8">'
            f"<title>{said}</title></circle>"
        )
    legend = [(_COLOURS.get(rate, "#a63c06"), f"link: {rate}") for rate in _rates(shown)]
    for number, (colour, text) in enumerate(legend):
        y = _TOP + 16 + 22 * number
        out.append(f'<circle cx="{right + 26}" cy="{y - 4}" r="4" fill="{colour}"/>')
        out.append(f'<text x="{right + 38}" y="{y}">{text}</text>')
    y = _TOP + 16 + 22 * len(legend)
    out.append(f'<circle cx="{right + 26}" cy="{y - 4}" r="4" fill="white" stroke="#555555"/>')
    out.append(f'<text x="{right + 38}" y="{y}">the model is fitted here</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _rates(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.case.rate for row in rows))

"""How the cost of an allreduce grows with the ranks: `python -m benchmarks.collectives.cost`.

An allreduce of S bytes on N ranks has each rank receive and send 2 (N - 1) / N S at least. Prints
what it costs through shared memory, and draws it against that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.collectives.__main__ import HERE, compile_driver, start_ranks

MIB = 1 << 20
SIZES = (16 * MIB, 64 * MIB)

# ns per byte and rank, by (bytes, ranks).
Costs = dict[tuple[int, int], float]


def law(ranks: float) -> float:
    """The bytes that each rank must receive, and send, for each byte of the tensor."""
    return 2 * (ranks - 1) / ranks


def measure(program: Path, counts: list[int], rounds: int) -> tuple[Costs, Costs]:
    """Medians of processor time and of elapsed time, in ns per byte for each rank.

    Where ranks are more than cores they take turns, so their elapsed time is multiplied by cores /
    ranks: what is left is the time a rank has a core to itself.
    """
    cores = len(os.sched_getaffinity(0))
    busy: dict[tuple[int, int], list[float]] = defaultdict(list)
    elapsed: dict[tuple[int, int], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for ranks in counts:
            for line in start_ranks(program, ranks, list(SIZES)).splitlines():
                nbytes, seconds, processor_seconds = line.split()
                key = int(nbytes), ranks
                busy[key].append(float(processor_seconds) / ranks / int(nbytes) * 1e9)
                share = min(1.0, cores / ranks)
                elapsed[key].append(float(seconds) * share / int(nbytes) * 1e9)
    return (
        {key: statistics.median(values) for key, values in busy.items()},
        {key: statistics.median(values) for key, values in elapsed.items()},
    )


def draw(busy: Costs, elapsed: Costs, counts: list[int]) -> str:
    """An SVG: cost as a multiple of that of two ranks, over the number of ranks."""
    left, top, width, height = 60, 40, 460, 280
    fewest, most = min(counts), max(counts)
    lines = []
    for name, costs, nbytes, colour, dash in [
        ("processor time, 16 MiB", busy, SIZES[0], "#1b6ca8", ""),
        ("processor time, 64 MiB", busy, SIZES[1], "#0b3954", ""),
        ("elapsed × cores / ranks, 16 MiB", elapsed, SIZES[0], "#e07a1f", "2 3"),
        ("elapsed × cores / ranks, 64 MiB", elapsed, SIZES[1], "#a63c06", "2 3"),
    ]:
        points = [(n, costs[nbytes, n] / costs[nbytes, fewest]) for n in counts]
        lines.append((name, points, colour, dash, True))
    steps = [fewest + (most - fewest) * i / 60 for i in range(61)]
    bound = [(n, law(n) / law(fewest)) for n in steps]
    lines.insert(0, ("2 (N − 1) / N", bound, "#555555", "7 4", False))
    highest = max(y for _, points, *_ in lines for _, y in points)
    top_tick = int(highest * 2 + 1) / 2

    def x_of(ranks: float) -> float:
        return left + width * (ranks - fewest) / (most - fewest)

    def y_of(value: float) -> float:
        return top + height * (1 - value / top_tick)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 250}" '
        f'height="{top + height + 60}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22">Cost of a byte for each rank, as a multiple of that on '
        f"{fewest} ranks</text>",
    ]
    tick = 0.0
    while tick <= top_tick:
        y = y_of(tick)
        out.append(f'<path d="M{left} {y:.1f}H{left + width}" stroke="#dddddd"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        tick += 0.5
    for ranks in counts:
        out.append(
            f'<text x="{x_of(ranks):.1f}" y="{top + height + 20}" text-anchor="middle">'
            f"{ranks}</text>"
        )
    out.append(
        f'<text x="{left + width / 2}" y="{top + height + 44}" text-anchor="middle">ranks N</text>'
    )
    for number, (name, points, colour, dash, dots) in enumerate(lines):
        places = [f"{x_of(n):.1f} {y_of(value):.1f}" for n, value in points]
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" fill="none"'
        out.append(f'<path d="M{"L".join(places)}" {style}/>')
        if dots:
            out += [
                f'<circle cx="{x_of(n):.1f}" cy="{y_of(value):.1f}" r="3.5" fill="{colour}"/>'
                for n, value in points
            ]
        y = top + 16 + 22 * number
        x = left + width + 20
        out.append(f'<path d="M{x} {y}h26" {style}/>')
        out.append(f'<text x="{x + 32}" y="{y + 4}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def table(busy: Costs, elapsed: Costs, counts: list[int]) -> str:
    """The medians, and each as a multiple of that of the fewest ranks."""
    lines = ["| size | ranks | 2(N-1)/N | processor ns/B | x | elapsed x cores/ranks ns/B | x |"]
    lines.append("|---" * 7 + "|")
    for nbytes in SIZES:
        first = nbytes, counts[0]
        for ranks in counts:
            key = nbytes, ranks
            lines.append(
                f"| {nbytes // MIB} MiB | {ranks} | {law(ranks) / law(counts[0]):.2f} "
                f"| {busy[key]:.3f} | {busy[key] / busy[first]:.2f} "
                f"| {elapsed[key]:.3f} | {elapsed[key] / elapsed[first]:.2f} |"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--svg", type=Path, help="where to draw it")
    arguments = parser.parse_args()
    counts = sorted(arguments.ranks)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "cost"
        compile_driver(program, HERE / "cost.cc")
        busy, elapsed = measure(program, counts, arguments.rounds)
    print(table(busy, elapsed, counts))
    if arguments.svg:
        arguments.svg.write_text(draw(busy, elapsed, counts), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

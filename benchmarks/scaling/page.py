"""The tables of docs/scaling.md and of README.md here, from the model and from results/.

`python -m benchmarks.scaling.page` writes them anew, each between its marks.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.scaling.chart import draw
from benchmarks.scaling.compared import Case, Row, compare, table
from benchmarks.scaling.model import MIB, Layout, Link, seconds

RESULTS = Path(__file__).resolve().parent / "results" / "hosts_1_2_3.json"
DOCS = report.REPOSITORY / "docs"
PAGES = (DOCS / "scaling.md", Path(__file__).resolve().parent / "README.md")
CHART = DOCS / "scaling.svg"

MODELS = [
    ("the MNIST example's CNN", 3.3e6),
    ("ResNet-50", 25.6e6),
    ("BERT-Base", 110e6),
    ("BERT-Large", 340e6),
    ("GPT-2 XL", 1.5e9),
]
GIGABITS = [1, 10, 25, 100, 200]
GPUS = [1, 8, 16, 32, 128, 512, 1000]
SLOTS = 8
BYTES_OF_GRADIENT = 4  # float32
# Of a gigabit, what is left for bytes after Ethernet's, IP's and TCP's headers: 1448 of 1538.
PAYLOAD = 1448 / 1538
# Not measured on any such network: what a message between hosts takes at least, over TCP.
MESSAGE_S = 50e-6


def link(gigabits: float) -> Link:
    """A network of so many Gbit/s for each host, as the predictions take it to be."""
    return Link(MESSAGE_S, gigabits * 1e9 / 8 * PAYLOAD)


def overhead_s(parameters: float, gpus: int, gigabits: float) -> float:
    """Predicted seconds that a step spends in averaging gradients between hosts."""
    layout = Layout(math.ceil(gpus / SLOTS), min(gpus, SLOTS))
    return seconds(layout, BYTES_OF_GRADIENT * parameters, link(gigabits))


def predictions() -> str:
    """Step overhead by model, link and number of GPUs, as a Markdown table."""
    lines = [
        "| model | link, Gbit/s | " + " | ".join(f"{n} GPU{'s' * (n > 1)}" for n in GPUS) + " |",
        "|---" * (len(GPUS) + 2) + "|",
    ]
    for name, parameters in MODELS:
        for gigabits in GIGABITS:
            cells = [report.time_text(overhead_s(parameters, n, gigabits)) for n in GPUS]
            cells = ["0" if n <= SLOTS else cell for n, cell in zip(GPUS, cells, strict=True)]
            said = f"{name}, {parameters / 1e6:g} M" if gigabits == GIGABITS[0] else ""
            lines.append(f"| {said} | {gigabits} | {' | '.join(cells)} |")
    return "\n".join(lines)


def checked(rows: Sequence[Row]) -> str:
    """How far off the model was, by link, of what it was not fitted on."""
    lines = [
        "| link | what | cases | error: median | largest | bytes on the link |",
        "|---" * 6 + "|",
    ]
    sorts = {
        "allreduce, 1 MiB and less": lambda case: case.kind == "allreduce" and case.nbytes <= MIB,
        "allreduce of more": lambda case: case.kind == "allreduce" and case.nbytes > MIB,
        "reductions of a training": lambda case: case.kind == "training",
    }
    between = [row for row in rows if row.case.layout.hosts > 1 and not row.fitted]
    for rate in dict.fromkeys(row.case.rate for row in rows):
        for name, belongs in sorts.items():
            found = [row for row in between if row.case.rate == rate and belongs(row.case)]
            errors = [abs(row.error) for row in found]
            sent = [row.case.sent / row.predicted_sent for row in found]
            lines.append(
                f"| {rate} | {name} | {len(found)} | {statistics.median(errors):.0%} "
                f"| {max(errors):.0%} | {min(sent):.2f} to {max(sent):.2f} of the model's |"
            )
    return "\n".join(lines)


def measured() -> tuple[dict[str, object], list[Row], dict[str, Link]]:
    """What the results were made on, their rows, and the links that were fitted."""
    found = json.loads(RESULTS.read_text("utf-8"))
    rows, links = compare([Case.of(one) for one in found["cases"]], found["about"]["cores"])
    return found["about"], rows, links


def tables() -> dict[str, str]:
    """By mark."""
    about, rows, links = measured()
    fits = [
        f"- {rate}: {one.message_s * 1e6:.0f} µs a message, {one.bytes_per_s / 1e6:.1f} MB/s"
        + (" for all hosts together" if one.shared else "")
        for rate, one in links.items()
    ]
    return {
        "predictions": predictions(),
        "checked": checked(rows),
        "fits": "\n".join(fits),
        "machine": f"{report.about_text(about)}; {str(about['time'])[:10]}.",
        "measured": table(rows),
    }


def with_tables(page: str, made: dict[str, str]) -> str:
    """The page, with each table that it has marks for as it is now.

    Raises:
        KeyError: it has a mark of which there is no table.
    """
    return re.sub(
        r"(<!-- (\w+): python -m benchmarks.scaling.page -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{made[found[2]]}\n{found[3]}",
        page,
        flags=re.DOTALL,
    )


def main() -> None:
    made = tables()
    for page in PAGES:
        page.write_text(with_tables(page.read_text("utf-8"), made), "utf-8")
    CHART.write_text(draw(measured()[1]), "utf-8")


if __name__ == "__main__":
    main()

"""Text of manifests and trainings, put into Markdown as what it is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# What may mean something to Markdown (CommonMark, and tables as GitHub has them) or be HTML. A dot,
# a dash or a low line between letters means nothing.
_MARKS = re.compile(r"[\\`*{}\[\]()<>#+!|~&$^]|(?<![^\W_])[_.-]|[_.-](?![^\W_])")


def escaped(text: str) -> str:
    """The text, in one line, that Markdown shows as it is."""
    return _MARKS.sub(lambda mark: f"\\{mark[0]}", " ".join(text.split()))


def code(text: str, *, in_table: bool = False) -> str:
    """The text, in one line, as code."""
    line = " ".join(text.split())
    runs = [len(run) for run in re.findall("`+", line)]
    fence = "`" * (max(runs, default=0) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") or not line else ""
    # A table's own escape. After a backslash it would be none.
    shown = line.replace("\\|", "\\ |").replace("|", "\\|") if in_table else line
    return f"{fence}{pad}{shown}{pad}{fence}"


def block(text: str, language: str = "") -> str:
    """The lines as a block of code."""
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * max(3, max(runs, default=0) + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

"""The pages of the documentation as Markdown: their blocks of code, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CHANGELOG")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^( *)```([a-z]*)\n(.*?)^\1```$", re.M | re.S)
_CODE = re.compile(r"(`+)(.+?)\1", re.S)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        place: page and line of its first fence, as messages have it.
        language: what stands behind the fence; may be empty.
    """

    place: str
    language: str
    text: str


def name_of(page: Path) -> str:
    """The page as a person names it."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    """Its blocks of code."""
    text = page.read_text("utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        indent = len(found[1])
        lines = [one[indent:] for one in found[3].splitlines(keepends=True)]
        yield Block(f"{name_of(page)}:{line}", found[2], "".join(lines))


def prose(page: Path) -> str:
    """Its text without blocks of code."""
    return _FENCE.sub("", page.read_text("utf-8"))


def spans(page: Path) -> Iterator[str]:
    """What stands between backticks in its text."""
    for found in _CODE.finditer(prose(page)):
        yield " ".join(found[2].split())


def links(page: Path) -> Iterator[str]:
    """The targets of its links."""
    text = _CODE.sub(lambda found: "`" + "x" * len(found[2]) + "`", prose(page))
    for found in _LINK.finditer(text):
        yield found[2]
        yield from (inner[2] for inner in _LINK.finditer(found[1]))


def anchors(page: Path) -> set[str]:
    """Where in the page a link may lead, as GitHub names headings; twice the same gets a number."""
    names: set[str] = set()
    for found in re.finditer(r"^#{1,6} (.+)$", prose(page), re.M):
        plain = re.sub(r"[^\w\- ]", "", found[1].strip().lower()).replace(" ", "-")
        name, number = plain, 0
        while name in names:
            number += 1
            name = f"{plain}-{number}"
        names.add(name)
    return names

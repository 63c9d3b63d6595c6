"""The public documents whose scripts must run unchanged, where their texts are at hand.

They are licensed, so they are not in this repository: SEED_DOCUMENTS names the folder with the
texts, by default ``shared/seeds`` beside the repository.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class WmlDocument:
    """The end-to-end example of Watson Machine Learning with DDL: its four files."""

    manifest: str
    train: str
    transform: str
    ddl: str


def _text(number: int) -> str:
    folder = Path(os.environ.get("SEED_DOCUMENTS", ROOT.parent / "shared" / "seeds"))
    found = sorted(folder.glob(f"{number:03d}_*.txt"))
    if not found:
        pytest.skip(
            f"the document [{number:03d}] is not in {folder}; SEED_DOCUMENTS names its folder"
        )
    return found[0].read_text("utf-8")


def _between(text: str, start: str, end: str) -> str:
    """The lines after the one that begins with `start`, up to the one that begins with `end`."""
    lines = text.splitlines(keepends=True)
    (first,) = [i for i, line in enumerate(lines) if line.startswith(start)]
    last = next(i for i, line in enumerate(lines) if i > first and line.startswith(end))
    return "".join(lines[first + 1 : last])


def with_real_connection(manifest: str) -> str:
    """The manifest with the template's placeholders filled in, as its user had to."""
    for placeholder, variable in (
        ("<auth-url>", "${S3_ENDPOINT_URL}"),
        ("<username>", "${S3_ACCESS_KEY_ID}"),
        ("<password>", "${S3_SECRET_ACCESS_KEY}"),
    ):
        manifest = manifest.replace(placeholder, variable)
    return manifest


def wml_document() -> WmlDocument:
    """The files of the WML end-to-end document; skips the test where the text is not at hand."""
    text = _text(0)
    return WmlDocument(
        manifest=_between(text, "Every training via IBM WML", "Save this as manifest.yml"),
        train=_between(text, "Here’s a sample mnist-train-ddl.py", "Here is the transformation"),
        transform=_between(text, "Here is the transformation", "There are a few concepts"),
        ddl=_between(text, "Place the content of this snippet", "Conclusion"),
    )

"""Pictures of pages in a browser, for people to look at and for the documentation."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path

# Those of the documentation, which `make screenshots` takes.
SCREENSHOTS = Path(__file__).parents[1] / "docs" / "screenshots"
_COLOURS = 128


def shot(page, name):
    """Keeps a picture where DDL_SCREENSHOTS says, for people to look at."""
    if folder := os.environ.get("DDL_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def picture(page, name):
    """One that the documentation shows; in few colours, to be small."""
    shot(page, name)
    if os.environ.get("DDL_DOCS_SCREENSHOTS"):
        from PIL import Image  # not in the environments of other Airflows

        with Image.open(BytesIO(page.screenshot())) as taken:
            few = taken.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        few.save(SCREENSHOTS / f"{name}.png", optimize=True)

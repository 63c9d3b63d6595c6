"""A browser in which somebody has logged in to the running Airflow."""

from __future__ import annotations

import os
import shutil
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from ddl_airflow.demo.site import USER
from tests.limits import within

# Those of the documentation, which `make screenshots` takes.
SCREENSHOTS = Path(__file__).parents[2] / "docs" / "screenshots"
_COLOURS = 128
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Without these a headless Chromium looks for hosts that a closed network does not have.
_QUIET = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="module")
def browsed(site):
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install -y chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_QUIET)
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(within(30_000))
        page.goto(site.url)
        page.locator("input[name=username]").fill(USER)
        page.locator("input[name=password]").fill(site.password)
        page.locator("button[type=submit]").click()
        # Its own way to the first page would break off the next one's.
        expect(page.get_by_text("Home", exact=True).first).to_be_visible(timeout=within(30_000))
        yield page
        browser.close()


@pytest.fixture
def page(browsed):
    """Whoever looks waits for as long as this machine takes now; by default 5 s."""
    browsed.set_default_timeout(within(30_000))
    expect.set_options(timeout=within(30_000))
    return browsed


def shot(page, name):
    """Keeps a picture where DDL_SCREENSHOTS says, for people to look at."""
    if folder := os.environ.get("DDL_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def picture(page, name):
    """One that the documentation shows; in few colours, to be small."""
    shot(page, name)
    if os.environ.get("DDL_DOCS_SCREENSHOTS"):
        with Image.open(BytesIO(page.screenshot())) as taken:
            few = taken.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        few.save(SCREENSHOTS / f"{name}.png", optimize=True)

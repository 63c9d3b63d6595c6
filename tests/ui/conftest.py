"""A browser in which somebody has logged in to the running Airflow."""

from __future__ import annotations

import shutil

import pytest
from playwright.sync_api import expect, sync_playwright

from ddl_airflow.demo.site import USER
from tests.limits import within

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

"""Debian's Chromium, for the tests that look at a page as a reader sees it."""

import shutil
from importlib.util import find_spec

import pytest

REBOUND = "rebound.example"
"""A name of a stranger that leads to this machine, as after DNS rebinding; no other name leads anywhere."""
_NAMES = f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
PATIENCE_MS = 60_000
"""How long a loaded machine may take to draw."""


@pytest.fixture(scope="module")
def browser(skip_or_fail):
    """A started browser; each test opens windows of its own."""
    chromium = shutil.which("chromium")
    if chromium is None or find_spec("playwright") is None:
        skip_or_fail("no chromium, or no playwright, on this machine")
    from playwright.sync_api import expect, sync_playwright  # noqa: PLC0415 - so that its absence is a skip

    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", _NAMES])
        yield started
        started.close()


@pytest.fixture
def expect(browser):
    """Playwright's assertions, which wait until they hold."""
    from playwright.sync_api import expect  # noqa: PLC0415 - as above

    return expect

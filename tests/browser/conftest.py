import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, async_playwright

from tests.browser.stage import Stage

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Debian's Chromium; without its sandbox, which root can't have, and with no traffic of its own."""
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    flags = ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-gpu"]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags, chromium_sandbox=False)
        yield browser
        await browser.close()


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with Stage(tmp_path).served() as served:
        yield served

"""The status page in Chromium: what it shows, how it stays live, and who can use it."""

import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Browser, Page, expect

from appliance.lifecycle import State
from appliance.phases import Phase, Progress
from tests.browser.stage import Stage

# For people: MJOLNIR_SCREENSHOTS=folder keeps the pictures.
PICTURES = os.environ.get("MJOLNIR_SCREENSHOTS")

# Colours as the browser resolves them, for every element with text of its own: WCAG 2's contrast ratio.
CONTRAST = """() => {
  const channels = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const rgb = channels(getComputedStyle(node).backgroundColor);
      if (rgb.length === 3 || rgb[3] === 1) return rgb;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.body.querySelectorAll("*")) {
    if (![...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim())) continue;
    if (!node.checkVisibility()) continue;
    const pair = [light(channels(getComputedStyle(node).color)), light(ground(node))].sort((a, b) => b - a);
    found.push([(pair[0] + 0.05) / (pair[1] + 0.05), node.tagName + "#" + node.id + " " + node.textContent.trim()]);
  }
  return found;
}"""


async def opened(browser: Browser, stage: Stage, **options: object) -> Page:
    """A page that is live; a script error or a blocked resource fails the test."""
    page = await browser.new_page(**options)
    page.on("pageerror", lambda error: pytest.fail(f"script error: {error}"))
    # Only while a stream is open is the engine asked: the first point has to come after it.
    async with page.expect_response("**/events"):
        await page.goto(stage.url)
    await stage.step()
    await expect(page.locator("#link")).to_have_text("live")
    return page


def tile(page: Page, name: str):
    return page.locator("#tiles div", has=page.locator("dt", has_text=name)).locator("dd")


async def busy(stage: Stage) -> None:
    """A minute and a half of work that looks like work."""
    for turn in range(45):
        extra = {"prefill": 4 if turn % 9 == 0 else 0, "mixed": 6 if turn % 9 == 1 else 0}
        await stage.step(t5=60 + turn % 7, tokens=70 + 8 * (turn % 5), q_len=3 * (turn // 30), **extra)


async def test_it_shows_state_figures_and_board(browser: Browser, stage: Stage):
    page = await opened(browser, stage)
    await stage.step(t5=90, prefill=30, q_len=10, tokens=100)
    await expect(page.locator("#state")).to_have_text("ready")
    await expect(page.locator("#model")).to_have_text("Qwen3-8B-FP8")
    await expect(page).to_have_title("ready · Qwen3-8B-FP8 · Mjolnir")
    await expect(tile(page, "T5 share")).to_have_text("90.0% last 2 min")
    await expect(tile(page, "Requests running")).to_have_text("3 2 waiting")
    await expect(tile(page, "KV cache")).to_have_text("25.0%")
    await expect(tile(page, "Memory available")).to_have_text("40.0 GiB")
    await expect(tile(page, "Hottest")).to_have_text("64.1 °C tj-thermal")
    await expect(tile(page, "Power")).to_have_text("97.5 W VIN")
    await expect(tile(page, "Energy per token")).to_have_text("1.95 J since this page opened")
    await expect(page.locator("#share-text")).to_have_text("T5 ran 69.2% of 130 steps, those with prompts included.")
    rows = await page.locator("#reasons tbody tr").all_inner_texts()
    assert [row.split("\t")[1:] for row in rows] == [
        ["decode steps", "90", "69.2%"],
        ["prompts being read (by design)", "30", "23.1%"],
        ["more query tokens than T5 is configured for", "10", "7.7%"],
    ]
    await expect(page.locator("#board-text")).to_have_text(
        "NVIDIA Jetson AGX Thor Developer Kit · L4T 38.4.1 · JetPack 7.1 · power mode 1 (120W)"
    )
    await expect(page.locator("#memory-text")).to_have_text(
        "83.8 GiB used, 38.0 GiB page cache, 1.0 GiB free, 40.0 GiB available, of 122.8 GiB."
    )
    await expect(page.locator("#clocks dl")).to_contain_text("1 CPUs242 MHz")
    await expect(page.locator("#fans dl")).to_contain_text("oc2 events since boot7")
    await expect(page.locator("#log")).to_contain_text("Avg generation throughput")
    await expect(page.locator("#notices")).to_be_hidden()
    # One column: T5 at the bottom with 69 % of the height, prefill and q_len above it.
    assert await page.locator("#share path.c0").get_attribute("d") == "M299 30.77h1v69.23h-1z"
    assert await page.locator("#share path").count() == 3


async def test_the_current_profile_stands_beside_the_model(browser: Browser, stage: Stage):
    stage.report["profile"] = "qwen3-8b-fp8"
    page = await opened(browser, stage)
    await expect(page.locator("#model")).to_have_text("Qwen3-8B-FP8 · qwen3-8b-fp8")
    stage.report["profile"] = None
    await stage.step()
    await expect(page.locator("#model")).to_have_text("Qwen3-8B-FP8")


async def test_a_start_shows_phase_percentage_and_eta(browser: Browser, stage: Stage):
    stage.report |= {"state": "starting", "progress": {"phase": "load", "percent": 50}}
    stage.pulse.state_changed(State.STARTING)
    stage.pulse.progressed(Progress(Phase.LOAD, 50))
    page = await opened(browser, stage)
    await expect(page.locator("#phases [aria-current=step]")).to_have_text("load")
    assert await page.locator("#phases .done").all_inner_texts() == ["import", "configure"]
    assert await page.locator("#progress").evaluate("bar => bar.value") == 50
    await expect(page.locator("#eta")).to_contain_text("Phase load, 50 %. About")
    await expect(page.locator("#events")).to_contain_text("starting")
    stage.report |= {"state": "ready", "progress": None}
    await stage.step()
    await expect(page.locator("#start")).to_be_hidden()
    await expect(page.locator("#spoken")).to_have_text("The engine is ready.")


async def test_an_alert_and_the_last_failure_are_said(browser: Browser, stage: Stage):
    page = await opened(browser, stage)
    stage.report["last_fault"] = {"cause": "unknown", "text": "the engine ended (killed by SIGKILL)"}
    await stage.step(t5=10, disabled=90)
    assert await page.locator("#notices p").all_inner_texts() == [
        "T5 ran only 10.0% of the last 2 min's decode steps; most often: T5 is switched off.",
        "Last failure (unknown): the engine ended (killed by SIGKILL)",
    ]
    await expect(page.locator("#spoken")).to_contain_text("T5 ran only 10.0%")


async def test_it_comes_back_after_the_appliance_was_away(browser: Browser, tmp_path: Path):
    stage = Stage(tmp_path)
    async with stage.served():
        page = await opened(browser, stage)
    await expect(page.locator("#link")).to_contain_text("connection lost")
    await stage.step(t5=77)
    async with stage.served():
        await expect(page.locator("#link")).to_have_text("live", timeout=20_000)
        await expect(page.locator("#reasons tbody tr").first).to_contain_text("77")
        await page.close()


async def test_nothing_comes_from_elsewhere_and_nothing_is_blocked(browser: Browser, stage: Stage):
    page = await browser.new_page()
    hosts, complaints = set(), []
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.on("console", lambda message: complaints.append(message.text))
    await page.goto(stage.url)
    await stage.step(t5=1, tokens=5)
    await expect(page.locator("#link")).to_have_text("live")
    assert hosts == {f"127.0.0.1:{stage.port}"}
    assert complaints == []


async def test_text_from_the_engine_stays_text(browser: Browser, stage: Stage):
    hostile = "<img src=x onerror='document.title=1'><b>bold</b>"
    stage.report |= {"model": hostile, "log_tail": [hostile], "last_fault": {"cause": hostile, "text": hostile}}
    page = await opened(browser, stage)
    await expect(page.locator("#log")).to_have_text(hostile)
    assert await page.locator("img, b").count() == 0


@pytest.mark.parametrize("width", [320, 390, 1280])
async def test_no_width_needs_scrolling_sideways(browser: Browser, stage: Stage, width: int):
    stage.report["log_tail"] = ["x" * 2000]
    page = await opened(browser, stage, viewport={"width": width, "height": 800})
    await busy(stage)
    await expect(page.locator("#reasons tbody tr")).to_have_count(4)
    assert await page.evaluate("document.scrollingElement.scrollWidth") == width


async def test_keyboard_and_landmarks(browser: Browser, stage: Stage):
    page = await opened(browser, stage)
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.textContent") == "Skip to the figures"
    await page.keyboard.press("Enter")
    assert await page.evaluate("document.activeElement.id") == "main"
    reached = []
    for _ in range(6):
        await page.keyboard.press("Tab")
        reached.append(await page.evaluate("document.activeElement.id || document.activeElement.className || 'link'"))
    assert reached[:5] == ["scroll", "follow", "log", "link", "link"]
    for landmark in ("banner", "main", "contentinfo"):
        await expect(page.get_by_role(landmark)).to_have_count(1)
    await expect(page.get_by_role("navigation", name="Other views")).to_be_visible()
    for name in ("Now", "Board", "Events", "Engine log"):
        await expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
    await expect(page.get_by_role("img", name="Attention steps by kernel")).to_be_visible()
    assert await page.locator("#spoken").get_attribute("aria-live") == "polite"
    assert await page.locator("section:not([aria-labelledby]):not([aria-label])").count() == 0


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("state", ["ready", "starting", "failed"])
async def test_every_text_has_a_contrast_of_4_5(browser: Browser, stage: Stage, scheme: str, state: str):
    stage.report |= {"state": state, "last_fault": {"cause": "unknown", "text": "gone"}}
    if state == "starting":
        stage.report["progress"] = {"phase": "compile", "percent": None}
    page = await opened(browser, stage, color_scheme=scheme)
    await busy(stage)
    texts = await page.evaluate(CONTRAST)
    assert len(texts) > 40
    assert [text for text in texts if text[0] < 4.5] == []
    if PICTURES:
        for name, width in (("desktop", 1280), ("phone", 390)):
            await page.set_viewport_size({"width": width, "height": 900})
            await page.screenshot(path=Path(PICTURES, f"{state}-{scheme}-{name}.png"), full_page=True)

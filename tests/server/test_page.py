"""The page in a headless browser: send, stream, stop, regenerate, reload, errors, and text that tries to be markup."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from expertserve.errors import ExpertReadError
from expertserve.models.batch import Batch
from tests.server.hash_world import DISK_LIMIT, World
from tests.server.worlds import Running, running

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
sync_api.expect.set_options(timeout=20_000)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Running]:
    with running(World()) as server:
        yield server


@pytest.fixture
def page(browser: Any, site: Running) -> Iterator[Any]:
    context = browser.new_context()
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.extend([request.url] * (not request.url.startswith(site.url))))
    page.goto(site.url)
    sync_api.expect(page.locator("#model")).to_contain_text("hash-moe")
    yield page
    site.world.heal()
    context.close()
    assert not [fault for fault in faults if not fault.startswith("data:")]


def ask(page: Any, text: str, max_tokens: int = 12) -> None:
    page.evaluate("document.getElementById('options').open = true")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", str(max_tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def settled(page: Any) -> None:
    sync_api.expect(page.locator("#send")).to_be_enabled()


def test_a_message_is_answered_and_is_there_after_a_reload(page: Any, site: Running) -> None:
    ask(page, "hello")
    settled(page)
    messages = page.evaluate("JSON.parse(localStorage.getItem('chat'))")
    assert messages[-1] == {"role": "assistant", "content": site.world.chat_text("hello", max_tokens=12)}
    assert "tok/s" in page.inner_text("#status")
    page.reload()
    assert page.locator("#messages article").count() == 2
    assert page.locator("#messages article.user").inner_text().endswith("hello")
    page.click("#regenerate")
    settled(page)
    assert page.evaluate("JSON.parse(localStorage.getItem('chat'))") == messages


def test_stop_keeps_what_came_and_the_server_forgets_the_request(page: Any, site: Running) -> None:
    site.world.slow(0.05)
    before = site.world.engine.snapshot()["cancelled"]
    page.evaluate("document.getElementById('options').open = true")
    ask(page, "a long story that does not end soon", max_tokens=400)
    page.wait_for_selector("article.assistant")
    page.click("#stop")
    settled(page)
    assert page.inner_text("#status") == "Stopped."
    site.world.wait_for("cancelled", before + 1)
    site.world.wait_for("requests_running", 0)


def test_errors_before_and_in_mid_stream_are_shown_and_the_chat_goes_on(page: Any, site: Running) -> None:
    ask(page, "x" * 600)
    settled(page)
    assert "maximum context length" in page.locator("article.error").last.inner_text()
    page.click("#clear")

    steps = 0

    def fault(batch: Batch) -> None:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise ExpertReadError("expert 3 of layer 1: read 0 of 4096 bytes")

    site.world.fault(fault)
    ask(page, "hello")
    settled(page)
    assert "expert 3 of layer 1" in page.locator("article.error").inner_text()
    site.world.heal()
    page.click("#regenerate")
    settled(page)
    assert page.locator("article.error").count() == 0 and page.locator("article.assistant").count() == 1


def test_markup_and_script_in_a_text_stay_text(page: Any) -> None:
    rendered = page.evaluate(
        """async () => {
            const { markdown } = await import('/ui/markdown.js');
            const box = document.createElement('div');
            box.append(markdown('**b** `c` <img src=x onerror=alert(1)> [l](https://a.example) [j](javascript:1)\\n'
                + '```js\\n<b>1</b>\\n```\\n- one\\n- *two*\\n\\n1. first'));
            return box.innerHTML;
        }"""
    )
    assert "<img" not in rendered and "javascript:" not in rendered.replace("[j](javascript:1)", "")
    for piece in ("<strong>b</strong>", "<code>c</code>", "&lt;b&gt;1&lt;/b&gt;", "<em>two</em>", "<ol><li>first"):
        assert piece in rendered


def test_the_keyboard_reaches_everything_and_each_control_has_a_name(page: Any) -> None:
    page.evaluate("document.getElementById('options').open = true")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea')].filter((node) =>
            !(node.textContent.trim() || node.ariaLabel || (node.labels && node.labels.length)))
            .map((node) => node.id)"""
    )
    assert nameless == []
    seen = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"prompt", "send", "clear", "temperature", "system", "theme", "panel-toggle", "skip"} <= seen


def test_dark_and_light_differ_and_are_kept(page: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(colour)
    page.click("#theme")
    after = page.evaluate(colour)
    assert before != after
    page.reload()
    assert page.evaluate(colour) == after


def test_the_panel_shows_slots_and_heat(page: Any) -> None:
    sync_api.expect(page.locator("#heat-text")).to_contain_text("1 layers")
    assert "2 of 3" in page.inner_text("#figures")
    page.click("#panel-toggle")
    assert page.is_hidden("#panel") and page.get_attribute("#panel-toggle", "aria-expanded") == "false"


def test_the_panel_shows_what_the_disk_gives_against_what_was_measured(page: Any, site: Running) -> None:
    def reads(rate: float) -> None:
        began = time.monotonic()
        site.world.read_bytes = lambda: int(rate * (time.monotonic() - began))

    def shown() -> tuple[float, float]:
        """Share of the bar and MiB a second, of one reading."""
        width, text = page.evaluate(
            "() => [document.querySelector('#disk span').style.width, document.querySelector('#disk-text').textContent]"
        )
        found = re.match(r"([0-9.]+) MiB/s now", text)
        return float(width.removesuffix("%")) / 100, float(found[1]) if found else 0.0

    text = page.locator("#disk-text")
    reads(DISK_LIMIT / 20)
    sync_api.expect(text).to_have_text(
        re.compile(r"^\d.* MiB/s now, .*; 64\.0 MiB/s were measured at start, the bar ends there\.$")
    )
    share, rate = shown()
    assert 0 < share < 1 and share == pytest.approx(rate / 64, abs=0.01)
    reads(DISK_LIMIT * 16)
    sync_api.expect(text).to_contain_text("64.0 MiB/s were measured at start, the bar ends at the most seen.")

"""The page, in a headless Chromium: type, send, watch, compare, stop."""

from __future__ import annotations

import re
import shutil
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from support.running_server import Running

webdriver = pytest.importorskip("selenium.webdriver")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
ENDLESS = "def f(a):\n    a = a\n    a = a\n    a = a\n"  # the toy goes on for 900 tokens
needs_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="chromium and chromedriver are not installed"
)


def start_browser() -> Any:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = start_browser()
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page as a user works it."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser, self.url = browser, url
        browser.get(f"{url}/")
        self.until("return window.paceline.model")

    def plainly(self) -> Page:
        """One text that is continued, without the comparison."""
        self.browser.execute_script(
            "document.getElementById('both').checked = false;"
            "const kind = document.getElementById('kind'); kind.value = 'completion';"
            "kind.dispatchEvent(new Event('change'));"
        )
        return self

    def until(self, script: str, seconds: float = 30) -> Any:
        end = time.monotonic() + seconds
        while not (value := self.browser.execute_script(script)):
            assert time.monotonic() < end, f"still not: {script}"
            time.sleep(0.02)
        return value

    def find(self, selector: str) -> Any:
        return self.browser.find_element("css selector", selector)

    def fill(self, name: str, value: str) -> None:
        field = self.find(f"#{name}")
        field.clear()
        field.send_keys(value)

    def text(self, selector: str) -> str:
        return str(self.find(selector).text)

    def wait(self) -> None:
        self.until("return window.paceline.running === null && window.paceline.runs > 0")


@pytest.fixture
def page(browser: Any, server: Running) -> Page:
    browser.set_window_size(1200, 1000)
    return Page(browser, server.url)


def test_policy_and_headers(server: Running) -> None:
    with urllib.request.urlopen(server.url, timeout=10) as answer:
        policy = answer.headers["Content-Security-Policy"]
        text = answer.read().decode()
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?:https?:)?//""", text)
    assert not outside
    assert "innerHTML" not in text  # a model's text never becomes a part of the page


def test_the_reference_is_served_offline(server: Running) -> None:
    with urllib.request.urlopen(f"{server.url}/docs", timeout=10) as answer:
        policy = answer.headers["Content-Security-Policy"]
        text = answer.read().decode()
    assert "default-src 'none'" in policy and "<script" not in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", text)
    for said in ("POST /v1/chat/completions", 'id="Speculation"', "draft_length", "GET /health"):
        assert said in text
    targets = set(re.findall(r'href="#([^"]+)"', text))
    assert targets and targets <= set(re.findall(r'id="([^"]+)"', text))


@needs_browser
def test_send_and_watch(page: Page) -> None:
    page.plainly().fill("tokens", "60")
    page.find("#send").click()
    first = page.until("return document.querySelectorAll('.text span').length")
    page.wait()
    spans = page.browser.find_elements("css selector", ".answer .text span")
    assert len(spans) == 60 >= first
    counts = page.text("[data-figure=tokens]"), page.text("[data-figure=step]")
    assert counts[0] == "60" and float(counts[1]) > 1.2
    assert page.text("[data-figure=accepted]").endswith(" %")
    assert float(page.text("[data-figure=rate]")) > 0
    kinds = {span.get_attribute("class") for span in spans}
    assert kinds == {"draft", "target"}
    colours = {
        page.browser.execute_script("return getComputedStyle(arguments[0]).color", page.find(css))
        for css in (".answer .draft", ".answer .target")
    }
    assert len(colours) == 2
    webdriver.ActionChains(page.browser).move_to_element(page.find(".answer .draft")).perform()
    tip = page.text("#tip")
    assert "drafted by" in tip and "undefined" not in tip
    assert re.search(r", position 1, probability 0?\.\d+|probability 1\.", tip), tip


@needs_browser
def test_side_by_side(page: Page) -> None:
    assert page.find("#both").is_selected()
    page.plainly().fill("tokens", "40")
    page.find("#both").click()
    page.find("#send").click()
    places = [pane.rect for pane in page.browser.find_elements("css selector", ".answer")]
    page.wait()
    left, right = (
        node.text for node in page.browser.find_elements("css selector", ".answer .text")
    )
    assert left == right
    assert "The texts are identical." in page.text("#verdict")
    assert re.match(r"\d+\.\d\dx as fast", page.text("#verdict"))
    panes = page.browser.find_elements("css selector", ".answer")
    assert [pane.rect for pane in panes] == places  # nothing has moved
    assert not panes[1].find_elements("css selector", ".draft")


@needs_browser
@pytest.mark.parametrize("chat", [True, False])
def test_columns_stand_still_while_text_arrives(page: Page, chat: bool) -> None:
    if not chat:
        page.plainly().find("#both").click()
    page.fill("tokens", "200")
    page.fill("prompt", "Once upon a time")
    page.browser.execute_script(
        "window.seen = new Set();"
        "new MutationObserver(() => document.querySelectorAll('.answer').forEach((pane, i) => {"
        "  const box = pane.getBoundingClientRect();"
        "  seen.add([i, box.x, box.width, box.y + scrollY, pane.scrollWidth].join(' '));"
        "})).observe(document.querySelector('main'), {subtree: true, childList: true});"
    )
    page.find("#send").click()
    page.wait()
    seen = page.browser.execute_script("return [...seen]")
    assert sorted(place.split()[0] for place in seen) == ["0", "1"], seen


@needs_browser
def test_a_chat_has_several_turns(page: Page) -> None:
    assert page.find("#kind").get_attribute("value") == "chat"
    page.fill("tokens", "8")
    for turn in (1, 2):
        page.fill("prompt", f"hello {turn}")
        page.browser.execute_script("window.paceline.runs = 0")
        page.find("#send").click()
        page.wait()
        assert len(page.browser.find_elements("css selector", ".turn")) == turn
        assert page.find("#prompt").get_attribute("value") == ""
    messages = page.browser.execute_script("return window.paceline.messages")
    roles = [message["role"] for message in messages]
    assert roles == ["user", "assistant"] * 2 and messages[2]["content"] == "hello 2"
    assert "hello 1" in page.text("#answers")
    page.find("#again").click()
    assert not page.browser.find_elements("css selector", ".turn")


@needs_browser
def test_what_keeps_the_page_from_the_server_is_said_once(page: Page) -> None:
    page.browser.execute_script(
        "window.fetch = () => Promise.reject(new TypeError('Failed to fetch'));"
        "window.paceline.runs = 0; connect(); poll();"
    )
    page.find("#send").click()
    page.wait()
    page.until("return document.getElementById('error').textContent")
    assert page.text("main").count("the server does not answer") == 1
    assert "Failed to fetch" not in page.text("main")


@needs_browser
def test_stop(page: Page, server: Running) -> None:
    page.plainly().fill("tokens", "900")
    page.fill("prompt", ENDLESS)
    page.find("#send").click()
    page.until("return document.querySelectorAll('.answer .text span').length > 3")
    assert page.find("#stop").is_enabled()
    page.find("#stop").click()
    page.wait()
    assert "stopped" in page.text(".answer .error")
    assert len(page.browser.find_elements("css selector", ".answer .text span")) < 900
    engine, end = server.service.client.engine.llm.engine, time.monotonic() + 10
    while engine.has_work:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert engine.cache.pool.available == engine.cache.pool.total


@needs_browser
def test_keyboard_alone(page: Page) -> None:
    from selenium.webdriver.common.keys import Keys

    page.plainly().fill("tokens", "12")
    prompt = page.find("#prompt")
    prompt.send_keys(Keys.CONTROL, Keys.ENTER)
    page.wait()
    answer = page.find(".answer .text")
    answer.send_keys(Keys.ARROW_RIGHT)
    first = page.text("#tip")
    answer.send_keys(Keys.ARROW_RIGHT)
    assert "probability" in first and page.text("#tip") != first
    page.fill("tokens", "900")
    page.fill("prompt", ENDLESS)
    prompt.send_keys(Keys.CONTROL, Keys.ENTER)
    page.until("return document.querySelectorAll('.answer .text span').length > 3")
    webdriver.ActionChains(page.browser).send_keys(Keys.ESCAPE).perform()
    page.until("return window.paceline.running === null")
    assert "stopped" in page.text(".answer .error")


@needs_browser
def test_errors_and_markup_are_text(page: Page) -> None:
    page.plainly().fill("prompt", "<img src=x onerror=alert(1)> <b>bold</b>")
    page.fill("tokens", "20")
    page.find("#send").click()
    page.wait()
    assert not page.browser.find_elements("css selector", "main img, main b")
    page.browser.execute_script("document.querySelector('#prompt').value = 'word '.repeat(1500)")
    page.browser.execute_script("window.paceline.runs = 0")
    page.find("#send").click()
    page.wait()
    assert "shorten the prompt" in page.text(".answer .error")


@needs_browser
def test_charts_move(page: Page) -> None:
    page.plainly().fill("tokens", "60")
    page.find("#send").click()
    page.until("return document.querySelectorAll('#charts polyline').length === 3")
    page.until(
        "return [...document.querySelectorAll('#charts polyline')]"
        ".every(line => (line.getAttribute('points') || '').length > 0)"
    )
    assert "tokens/s" in page.text("#charts")
    assert page.text("#metrics-note") == ""


@needs_browser
def test_phone(page: Page) -> None:
    page.browser.set_window_size(500, 900)
    page.browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True},
    )
    try:
        page.browser.get(f"{page.url}/")
        wide = page.browser.execute_script(
            "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wide <= 0
        assert page.find("#send").is_displayed()
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@needs_browser
def test_nothing_comes_from_outside_and_nothing_was_refused(page: Page) -> None:
    loaded = page.browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert loaded and all(name.startswith(page.url) for name in loaded)
    messages = [entry["message"] for entry in page.browser.get_log("browser")]
    assert not [m for m in messages if "Content Security Policy" in m or "Uncaught" in m]

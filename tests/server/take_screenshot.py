"""The picture of the page in the README: a side-by-side answer of the pulled model that has ended.

python tests/server/take_screenshot.py docs/images/page.png
"""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from test_page import Page, start_browser, webdriver

from paceline import LLM
from support.running_server import serve, service_of

FIRST = "Explain in two sentences what a compiler does."  # warms up
PROMPT = "Write a Python class Point with x, y, and methods add, subtract and multiply."


def main(path: str) -> None:
    browser = start_browser()
    name = "paceline/smollm2"
    with closing(serve(service_of(LLM(name), name))) as servers:
        browser.set_window_size(1120, 1078)
        page = Page(browser, next(iter(servers)).url)
        page.browser.execute_script("document.documentElement.style.scrollbarWidth = 'none'")
        page.fill("tokens", "80")
        for prompt in (FIRST, PROMPT):
            page.find("#again").click()
            page.fill("prompt", prompt)
            page.browser.execute_script("window.paceline.runs = 0")
            page.find("#send").click()
            page.wait()
        time.sleep(3)  # the charts are drawn every two seconds
        page.browser.execute_script(
            "document.querySelectorAll('.text').forEach(t => t.scrollTop = 0)"
        )
        webdriver.ActionChains(browser).move_to_element(page.find(".answer .draft")).perform()
        browser.save_screenshot(path)
        browser.quit()


if __name__ == "__main__":
    main(sys.argv[1])

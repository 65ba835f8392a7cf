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

PROMPT = (
    "Rename the variable x to total, and write the whole function again:\n\n"
    "def add_all(numbers):\n    x = 0\n    for number in numbers:\n        x += number\n"
    "    return x"
)


def main(path: str) -> None:
    browser = start_browser()
    with closing(serve(service_of(LLM("paceline/smollm2")))) as servers:
        browser.set_window_size(1120, 1230)
        page = Page(browser, next(iter(servers)).url)
        page.fill("tokens", "120")
        for _ in range(2):  # the first run warms up
            page.find("#again").click()
            page.fill("prompt", PROMPT)
            page.browser.execute_script("window.paceline.runs = 0")
            page.find("#send").click()
            page.wait()
        time.sleep(3)  # the charts are drawn every two seconds
        webdriver.ActionChains(browser).move_to_element(page.find(".answer .draft")).perform()
        browser.save_screenshot(path)
        browser.quit()


if __name__ == "__main__":
    main(sys.argv[1])

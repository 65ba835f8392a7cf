"""docs/benchmarks.md is what figures.json says: few rows, each with machine, command and date."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import figures

ROOT = Path(__file__).resolve().parents[2]


def test_page_and_charts_are_written() -> None:
    for path, text in figures.files().items():
        assert path.read_text(encoding="utf-8") == text, "run python benchmarks/figures.py"


def test_the_page_is_short() -> None:
    tables = figures.FIGURES["tables"]
    assert sum(len(table["rows"]) for table in tables) <= 60
    assert len(figures.FIGURES["charts"]) <= 4
    page = figures.PAGE.read_text(encoding="utf-8")
    assert {table["name"] for table in tables} == set(re.findall("<!-- figures: (.*) -->", page))
    assert len(re.findall(r"^\|", page, re.M)) == sum(2 + len(t["rows"]) for t in tables)


@pytest.mark.parametrize("table", figures.FIGURES["tables"], ids=lambda table: str(table["name"]))
def test_a_table_names_machine_date_and_command(table: dict[str, str]) -> None:
    assert table["machine"] and re.search(r"\d+ \w+ 20\d\d$", table["date"])
    for script in re.findall(r"benchmarks/\w+\.py", table["command"]):
        assert (ROOT / script).is_file()
    assert all(len(row) == len(table["columns"]) for row in table["rows"])


@pytest.mark.parametrize("chart", figures.FIGURES["charts"], ids=lambda chart: str(chart["name"]))
def test_a_chart_is_drawn_for_both_colour_schemes(chart: dict[str, str]) -> None:
    text = figures.svg(chart)
    ElementTree.fromstring(text)
    assert "prefers-color-scheme:dark" in text
    assert f"](images/{chart['name']}.svg)" in figures.PAGE.read_text(encoding="utf-8")
    table = figures.TABLES[chart["table"]]
    assert table["date"] in text and table["command"].split()[0] in text


def test_cells_are_read() -> None:
    assert figures.number("1.87x (1.42)") == 1.87 and figures.number("3.71 1.85x") == 1.85
    assert figures.number("45.7") == 45.7 and figures.number("") is None


def test_an_old_table_in_the_page_is_replaced() -> None:
    page = "a\n<!-- figures: drafters -->\nold\n<!-- end -->\nb"
    new = figures.page(page)
    assert "old" not in new and "`suffix`" in new and figures.page(new) == new

"""docs/contributing/architecture.md draws the layers that tests/test_imports.py enforces."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from test_imports import FOREIGN, LAYERS, SOURCE

PAGE = Path(__file__).resolve().parents[1] / "docs" / "contributing" / "architecture.md"


def built(room: str) -> bool:
    """The rule also knows rooms that are planned; the drawing shows those that stand."""
    return (SOURCE / room).is_dir() or (SOURCE / f"{room}.py").is_file()


def test_the_drawing_shows_every_room_in_the_order_of_the_layers() -> None:
    drawing = re.search(r"```text\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert drawing is not None
    at = {
        word: number
        for number, line in enumerate(drawing[1].splitlines())
        for word in line[24:].replace("-", " ").replace("|", " ").split()
    }
    rooms = [{room for room in layer if built(room)} for layer in LAYERS]
    assert set(at) == set().union(*rooms)
    for below, above in pairwise(rooms):
        assert max(at[room] for room in above) <= min(at[room] for room in below)


def test_the_page_names_who_may_use_foreign_libraries() -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    for library in FOREIGN.keys() - {"ray"}:
        assert f"`{library}` in" in page


def test_what_the_page_links_to_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / target).exists(), target


def test_the_page_lists_every_record_of_a_step() -> None:
    """Twelve from request to text, those of core/batch.py among them."""
    text = PAGE.read_text(encoding="utf-8").partition("## What passes")[2].partition("##")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(listed) == len(set(listed)) == 12
    passed = (SOURCE / "core" / "batch.py").read_text(encoding="utf-8")
    assert set(re.findall(r"^class (\w+)", passed, re.MULTILINE)) <= set(listed)

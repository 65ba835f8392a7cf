"""The generated tables of the reference have all that the code has, and stand on a page."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.main import app
from paceline.server.metrics import Metrics

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def tables() -> dict[str, str]:
    sys.path.insert(0, str(DOCS / "build"))
    try:
        import generated
    finally:
        sys.path.pop(0)
    return {name: make() for name, make in generated.TABLES.items()}


def test_every_table_stands_on_one_page(tables: dict[str, str]) -> None:
    pages = [page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md")]
    asked = [name for page in pages for name in re.findall(r"<!-- generated: (\w+) -->", page)]
    assert sorted(asked) == sorted(tables)


def test_every_metric_is_listed_and_explained(tables: dict[str, str]) -> None:
    for family in Metrics().registry.collect():
        assert family.documentation
        assert re.search(rf"`{family.name}(_total|_info)?[{{`]", tables["metrics"]), family.name


def test_every_option_of_every_command_is_listed_once(tables: dict[str, str]) -> None:
    sections = dict(re.findall(r"^### (.*)\n((?:(?!### ).*\n?)*)", tables["commands"], re.M))
    shared = sections.pop("Shared options"), sections.pop("Options of training")
    for table in shared:
        flags = re.findall(r"^\| (`--[^|]*) \|", table, re.M)
        assert len(flags) == len(set(flags))

    def check(command: Any, name: str) -> None:
        for inner in getattr(command, "commands", {}).values():
            check(inner, f"{name} {inner.name}")
        if hasattr(command, "commands"):
            return
        text = sections.pop(name)
        for parameter in command.params:
            if parameter.param_type_name == "option" and "help" not in parameter.name:
                assert text.count(f"`{parameter.opts[0]}`") == 1, (name, parameter.opts)
                assert parameter.help

    check(typer.main.get_command(app), "paceline")
    assert not sections

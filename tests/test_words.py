"""Help texts and users' pages speak the field's language, not one of our own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
# They say what things were called then.
HISTORY = {"decisions.md", "CHANGELOG.md", "upgrading.md", "changes-0.2.0.md"}
PAGES = [
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in HISTORY),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
]
# What we used to say, as a pattern, and what the field says.
WORDS = {
    r"best-first": "dynamic tree (EAGLE-2)",
    r"purse|grants?|stake|allowance|ledger": "exploration budget, saved time, limit",
    r"look-ups?|a look|looks in vain": "lookup",
    r"rehears\w+": "warm up",
    r"quicken\w*|adopt(s|ed|ing)?|twins?": "optimised, use the native backend, quantised copy",
    r"witness\w*": "kernel counters",
    r"desks?": "engine endpoint",
    r"contestants?|entrants?": "baseline, engine",
    r"bought": "completed",
    r"put by": "reserved",
    r"told": "explicit, or says",
    r"natural[ _]length": "default draft length",
}


def private(text: str) -> Iterator[str]:
    """Each private word of a text, with its line and what to write."""
    for number, line in enumerate(text.splitlines(), 1):
        for words, better in WORDS.items():
            for match in re.finditer(rf"\b({words})\b", line, re.IGNORECASE):
                yield f"line {number}: {match[0]!r}: write {better}"


def helps(command: Any, context: Any) -> Iterator[str]:
    """The help of a command and of those below it."""
    yield command.get_help(context)
    for name, child in getattr(command, "commands", {}).items():
        yield from helps(child, type(context)(child, info_name=name, parent=context))


def test_a_private_word_is_seen() -> None:
    assert list(private("fine\nThe purse is empty")) == [
        "line 2: 'purse': write exploration budget, saved time, limit"
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    assert not list(private(page.read_text(encoding="utf-8")))


def test_help_uses_the_words_of_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    group = typer.main.get_command(app)
    texts = list(helps(group, group.context_class(group, info_name="paceline")))
    assert len(texts) > 10
    assert not [word for text in texts for word in private(text)]


NAMES = {"each", "found", "own", "place", "said", "say", "tell", "told", "twin", "witness"}
FIELDS = {"found"}  # of a doctor's finding, and of its JSON: what was found
SOURCES = sorted((ROOT / "src" / "paceline").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_say_what_they_hold(path: Path) -> None:
    """No variable, parameter, function or field is called what anything could be called."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        name
        for node in ast.walk(tree)
        for name in (
            node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None,
            node.arg if isinstance(node, ast.arg) else None,
            node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None,
        )
        if name in NAMES
    }
    assert not names - (FIELDS if path.parent.name == "doctor" else set())

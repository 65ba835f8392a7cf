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

pytestmark = pytest.mark.usefixtures("no_collector")

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


def test_pages_use_the_words_of_the_field() -> None:
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    assert not [(page, word) for page, text in texts.items() for word in private(text)]


def test_help_uses_the_words_of_the_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    group = typer.main.get_command(app)
    texts = list(helps(group, group.context_class(group, info_name="paceline")))
    assert len(texts) > 10
    assert not [word for text in texts for word in private(text)]


NAMES = {"each", "found", "own", "place", "said", "say", "tell", "told", "twin", "witness"}
# Former names of public methods, fields, options and JSON keys.
NAMES |= {"costless", "ends_early", "heats", "least_chance", "looks_up", "noted"}
NAMES |= {"partings", "take_in", "takes_forced", "target_in", "unrest", "when_lost"}
FIELDS = {"found"}  # of a doctor's finding, and of its JSON: what was found


# What gives something a name, and where that stands.
_NAMING = {ast.Name: "id", ast.arg: "arg", ast.FunctionDef: "name", ast.AsyncFunctionDef: "name"}


def names_of(path: Path) -> set[str]:
    """Of the variables, parameters and functions that a file makes."""
    return {
        getattr(node, _NAMING[type(node)])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if type(node) in _NAMING and not isinstance(getattr(node, "ctx", None), ast.Load)
    }


def test_names_say_what_they_hold() -> None:
    """No variable, parameter, function or field is called what anything could be called."""
    named = {path: names_of(path) & NAMES for path in (ROOT / "src" / "paceline").rglob("*.py")}
    for path in named:
        if path.parent.name == "doctor":
            named[path] -= FIELDS
    assert not {str(path): names for path, names in named.items() if names}

"""How tests run commands, and what they ask of bad input: one line, no result, no traceback."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner, Result

from paceline.cli.main import app


def every_command(group: Any = None, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words of each command, and the command."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, *words, name)
        else:
            yield (*words, name), command


def paceline(*arguments: str, input: str | None = None, **environment: str) -> Result:
    """A command with these arguments, in this process."""
    return CliRunner().invoke(app, list(arguments), input=input, env=environment)


def refusals(text: str) -> list[tuple[list[str], str]]:
    """Arguments and what is to be said of them, a case a line: ``--rounds 0 | --rounds is 0``."""
    cases = [line.split(" | ") for line in text.strip().splitlines()]
    return [(shlex.split(arguments), words.strip()) for arguments, words in cases]


def assert_one_line(result: Result, *words: str) -> None:
    """Exit code 1, nothing on stdout, and one line that says these things."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert "unexpected" not in lines[0]
    for word in words:
        assert word in lines[0], lines[0]

"""--help fits a screen, and --help-all has the rest."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.command_lines import every_command, paceline


@pytest.mark.parametrize("words", [words for words, _ in every_command()], ids=" ".join)
def test_help_fits_a_screen(words: tuple[str, ...]) -> None:
    short = paceline(*words, "--help", COLUMNS="80")
    assert short.exit_code == 0 and len(short.stdout.splitlines()) <= 36, short.stdout
    whole = paceline(*words, "--help-all", COLUMNS="80")
    assert whole.exit_code == 0
    if "--help-all" not in short.stdout:
        assert whole.stdout == short.stdout
    else:
        assert len(whole.stdout.splitlines()) > len(short.stdout.splitlines())


@pytest.mark.parametrize("words", [(), ("train",), ("datastore",)], ids=" ".join)
def test_the_list_of_commands_fits_a_screen(words: tuple[str, ...]) -> None:
    assert len(paceline(*words, "--help", COLUMNS="80").stdout.splitlines()) <= 36


def test_help_shows_the_first_sentence_and_help_all_the_rest() -> None:
    short, whole = (
        paceline("bench", word, COLUMNS="200").stdout for word in ("--help", "--help-all")
    )
    assert "Requests that run at once." in short and "are compared" not in short
    assert "Several, such as 1,2,4,8, are compared." in whole
    assert "--draft-length" not in short and "--draft-length" in whole
    assert paceline("bench", "--help", COLUMNS="200").stdout == short  # whole changed no option


def test_switches_show_no_type() -> None:
    assert "<bool>" not in paceline("generate", "--help").stdout
    assert "<bool>" not in paceline("--help").stdout
    assert "<bool>" not in paceline("train", "--help").stdout


def test_the_makefiles_commands_exist() -> None:
    """``make demo`` once named an option that was gone."""
    lines = (Path(__file__).resolve().parents[2] / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"\$\(BIN\)/paceline ([a-z-]+)([^\n&|;]*)", lines)
    assert {"demo", "pull"} <= {command for command, _ in found}
    for command, rest in found:
        known = paceline(command, "--help-all", COLUMNS="200").output
        assert all(flag in known for flag in re.findall(r"--[a-z-]+", rest)), (command, rest)

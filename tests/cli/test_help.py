"""--help fits a screen, --help-all has the rest, and other names of a thing lead to ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from paceline.cli.main import app
from support.command_lines import paceline


def commands(group: Any, *words: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *words, name)
        else:
            yield (*words, name)


@pytest.mark.parametrize("words", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_help_fits_a_screen(words: tuple[str, ...]) -> None:
    short = paceline(*words, "--help", COLUMNS="80")
    assert short.exit_code == 0 and len(short.stdout.splitlines()) <= 50, short.stdout
    if "--help-all" in short.stdout:
        whole = paceline(*words, "--help-all", COLUMNS="80")
        assert whole.exit_code == 0
        assert len(whole.stdout.splitlines()) > len(short.stdout.splitlines())


def test_switches_show_no_type() -> None:
    assert "<bool>" not in paceline("generate", "--help").stdout
    assert "<bool>" not in paceline("--help").stdout


def test_a_narrow_terminal_cuts_no_words() -> None:
    command = [sys.executable, "-m", "paceline", "chat", "--help"]
    narrow = dict(os.environ, COLUMNS="40")
    printed = subprocess.run(command, env=narrow, capture_output=True, text=True, check=True).stdout
    assert "--temperature" in printed and "\N{HORIZONTAL ELLIPSIS}" not in printed


def test_other_names_lead_to_ours() -> None:
    asked = ["generate", "hello", "--model", "paceline/tiny", "--max-new-tokens", "2"]
    done = paceline(*asked, "--drafter=none", "--json")
    assert done.exit_code == 0, done.output
    assert "--drafter is --draft here" in done.stderr
    assert "--max-new-tokens is --max-tokens here" in done.stderr
    printed = paceline("serve", "--model", "paceline/tiny", "--max-num-seqs", "3", "--print-config")
    assert 'model = "paceline/tiny"' in printed.stdout and "max_batch_size = 3" in printed.stdout
    refused = paceline("serve", "--gpu-memory-utilization", "0.9")
    assert refused.exit_code == 2 and "kv_cache_memory" in refused.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "eagle3", "--processes", "2"], "there is no --processes; one process trains"),
        (["certify", "--continue"], "there is no --continue; give the run more --seconds"),
        (["tune", "--state", "x"], "there is no --state; give the run more --seconds"),
        (["demo", "--pull"], "there is no --pull; paceline pull smollm2 fetches"),
        (["certify", "--perplexity", "x"], "there is no --perplexity; paceline quantize"),
        (["bench", "--suite", "gsm8k", "x"], "there is no --suite; measure the file: --prompts"),
    ],
)
def test_options_that_are_gone_say_what_to_do(arguments: list[str], words: str) -> None:
    refused = paceline(*arguments, COLUMNS="200")
    assert refused.exit_code == 2 and words in refused.output


def test_a_model_by_position_where_it_is_the_only_one() -> None:
    done = paceline("doctor", "paceline/tiny", "--draft", "none", "--json")
    assert '"model": "paceline/tiny"' in done.stdout or "paceline/tiny" in done.stdout


def test_the_makefiles_commands_exist() -> None:
    """``make demo`` once named an option that was gone."""
    lines = (Path(__file__).resolve().parents[2] / "Makefile").read_text(encoding="utf-8")
    found = re.findall(r"\$\(BIN\)/paceline ([a-z-]+)([^\n&|;]*)", lines)
    assert {"demo", "pull"} <= {command for command, _ in found}
    for command, rest in found:
        known = paceline(command, "--help-all", COLUMNS="200").output
        assert all(flag in known for flag in re.findall(r"--[a-z-]+", rest)), (command, rest)

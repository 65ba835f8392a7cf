"""``paceline profile``: tables, JSON, report and trace; errors in one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli.main import app
from support.command_lines import assert_one_line, paceline, refusals
from support.tiny_models import TinyPair


@pytest.fixture(scope="module")
def arguments(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = tmp_path_factory.mktemp("prompts") / "one.txt"
    prompts.write_text("Once upon a time\n")
    pair = ["--model", tiny_pair.target, "--draft", tiny_pair.draft, "--dtype", "float32"]
    few = ["--steps", "5", "--rounds", "1", "--draft-length", "2"]
    return ["profile", *pair, "--prompts", str(prompts), *few]


def test_json_report_and_trace(arguments: list[str], tmp_path: Path) -> None:
    report, trace = tmp_path / "profile.html", tmp_path / "trace.json"
    result = paceline(*arguments, "--json", "--report", str(report), "--trace", str(trace))
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    plain, fast = record["runs"]
    assert plain["name"] == "plain" and plain["drafted_tokens"] == 0
    assert fast["drafted_tokens"] == 5 * 2
    assert record["machine"]["read_bandwidth"] > 1e8
    for item in (plain, fast):
        phases = item["phases"]
        assert sum(p["share"] for p in phases.values()) == pytest.approx(1)
        for phase in phases.values():
            parts = phase["kernels"] + phase["launches"] + phase["python"]
            assert parts == pytest.approx(phase["seconds"])
        assert len(item["verdict"]) >= 2
    targets = [run["phases"]["target"] for run in (plain, fast)]
    assert 3 <= targets[1]["flops"] / targets[0]["flops"] < 4  # three rows, and their attention
    assert targets[1]["parameters"] == targets[0]["parameters"] > 0
    assert "Whose time it is" in report.read_text()
    assert json.loads(trace.read_text())["traceEvents"]
    assert record["trace"] == str(trace)


def test_tables_of_several_sequences(arguments: list[str]) -> None:
    result = paceline(*arguments, "--concurrency", "2")
    assert result.exit_code == 0, result.output
    for words in ("2 sequences at once", "of read", "read bandwidth", "Verdict: plain", "helps:"):
        assert words in result.stdout


@pytest.mark.parametrize(
    ("extra", "words"),
    refusals("""
    --trace trace.txt | end its name in .json or .json.gz
    --report profile.pdf | end its name in .md or .html
    --prompts no/such/prompts.txt | no/such/prompts.txt
    """),
)
def test_bad_input_is_one_line(arguments: list[str], extra: list[str], words: str) -> None:
    assert_one_line(paceline(*arguments, *extra), words)


def test_commands_of_the_page_parse() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "guides" / "profile.md"
    lines = [line.partition("  #")[0] for line in page.read_text(encoding="utf-8").splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("paceline profile")]
    assert len(commands) == 3
    group: Any = typer.main.get_command(app)
    for words in commands:
        group.commands["profile"].make_context("profile", words[2:])


def test_interrupted(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the second way of decoding is profiled: the first is shown."""

    from paceline.lab.profiling import steady

    profile, calls = steady.profiled, []

    def interrupt(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return profile(*args)

    monkeypatch.setattr(steady, "profiled", interrupt)
    result = paceline(*arguments)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    assert "Verdict: plain" in result.stdout
    assert result.stdout.count("Verdict") == 1

"""``paceline profile``: tables, JSON, report and trace; errors in one line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from paceline.cli.main import app
from paceline.lab.profiling import steady
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
        assert item["forward"]["bytes"] > 0 and "What helps" in item["verdict"]
    assert fast["forward"]["flops"] == 3 * plain["forward"]["flops"]  # three rows
    assert "of read bandwidth" in report.read_text(encoding="utf-8")
    assert json.loads(trace.read_text())["traceEvents"]
    assert record["trace"] == str(trace)


def test_tables_of_several_sequences(arguments: list[str]) -> None:
    result = paceline(*arguments, "--concurrency", "2")
    assert result.exit_code == 0, result.output
    for words in ("2 sequences at once", "of read bandwidth", "Verdict", "plain: a step", "helps:"):
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


def test_interrupted(arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ctrl-C while the trace is written: the figures are shown."""

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.lab.profiling.steady.write_trace", interrupt)
    result = paceline(*arguments, "--trace", str(tmp_path / "t.json"), "--json")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
    record = json.loads(result.stdout)
    assert len(record["runs"]) == 2 and record["trace"] is None


def test_interrupted_in_a_round(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second round: the figures are those of the first."""
    run, calls = steady.run, list[int]()

    def interrupted(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 4:  # two warm-ups, two runs of the first round
            raise KeyboardInterrupt
        return run(*args)

    monkeypatch.setattr(steady, "run", interrupted)
    result = paceline(*arguments, "--rounds", "2", "--json")
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert len(json.loads(result.stdout)["runs"]) == 2

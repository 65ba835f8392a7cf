"""``paceline tune`` from the command line: its output, its file, and what it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.settings.tuned import TunedSettings
from support.command_lines import assert_one_line, paceline, refusals

SMALL = ["tune", "--draft", "ngram", "--draft-only", "--max-tokens", "9", "--rounds", "1"]
tune = partial(paceline, *SMALL)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.tune.plan.MIN_BATCH_SIZE", 2)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("one two three one two three one two\n---\ndef add(a, b):\n", encoding="utf-8")
    return str(file)


def test_the_embedded_target(prompts: str, tmp_path: Path) -> None:
    out, report = str(tmp_path / "sub" / "p.toml"), str(tmp_path / "r.html")
    result = tune("--prompts", prompts, "--out", out, "--report", report, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["confirmed"] is True
    assert record["config"] == out
    assert [entry["spec"] for entry in record["search"]] == ["ngram"]
    assert record["search"][0]["acceptance"] and record["search"][0]["acceptance_rate"] is not None
    assert {entry["spec"] for entry in record["confirmation"]} == {"none", "ngram"}
    assert f"tuned settings: {out}" in result.stderr
    html = Path(report).read_text(encoding="utf-8")
    assert "<h2>Confirmed by decoding</h2>" in html
    settings = TunedSettings.read(out)
    assert settings.model.name == "paceline/tiny"
    assert settings.draft.spec in ("none", "ngram")
    assert settings.why == record["decision"]
    text = paceline("generate", "--config", out, "--json", "--max-tokens", "12", "one two one two")
    plain = paceline(
        "generate", "--draft", "none", "--json", "--max-tokens", "12", "one two one two"
    )
    assert text.exit_code == plain.exit_code == 0, text.output
    assert json.loads(text.stdout)["text"] == json.loads(plain.stdout)["text"]
    assert "note:" not in text.stderr
    again = tune("--prompts", prompts, "--out", out)
    assert again.exit_code == 1
    assert "it exists already; choose another name, or give --force" in again.stderr


def test_an_interruption_shows_what_there_is_and_writes_nothing(
    prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.lab.tune.plan.round_size", interrupted)
    out = tmp_path / "p.toml"
    result = tune("--prompts", prompts, "--out", str(out))
    assert result.exit_code == 130
    assert "Not confirmed: " in result.stdout or "Nothing was measured" in result.stdout
    assert "Choice" in result.stdout
    assert "no tuned settings were written, because no result was confirmed" in result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    refusals("""
    --prompts nowhere.jsonl | nowhere.jsonl
    --category poetry | no category poetry
    --report r.pdf | end its name in .md or .html
    --report /dev/null/r.md | cannot write the report /dev/null/r.md: Not a directory
    --out . | the tuned settings .: it is a folder
    --out /dev/null/p.toml | cannot write the tuned settings /dev/null/p.toml: Not a directory
    --model nowhere/at/all | model folder nowhere/at/all does not exist
    """),
)
def test_bad_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    assert_one_line(tune("--out", str(tmp_path / "p.toml"), *arguments), message)


def test_a_foreign_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("version = 1\n", encoding="utf-8")
    result = paceline("generate", "--config", str(tmp_path / "p.toml"), "Once")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "missing required field" in result.stderr


def test_the_former_name_of_the_option_is_taken(tmp_path: Path) -> None:
    result = paceline("generate", "--profile", str(tmp_path / "p.toml"), "Once")
    note, error = result.stderr.splitlines()
    assert note == "note: --profile is --config here"
    assert error.startswith(f"error: tuned settings file {tmp_path / 'p.toml'} cannot be read")

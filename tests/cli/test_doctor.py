"""``paceline doctor``: table, JSON, report, exit codes and bad input."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.model.names import resolve
from support.command_lines import assert_one_line, paceline, refusals

run = partial(paceline, "doctor")


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A draft whose config asks for a weight that is missing."""
    folder = tmp_path / "draft"
    shutil.copytree(resolve("paceline/tiny-draft"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return str(folder)


def test_the_embedded_pair() -> None:
    result = run("--draft", "paceline/tiny-draft")
    assert result.exit_code == 0, result.output
    for words in ("In order", "all 110 tensors", "4,096 ids mean the same"):
        assert words in result.stdout
    record = json.loads(run("--json").stdout)  # with the default draft
    assert "draft-auto" in {item["code"] for item in record["findings"]}
    warned = {item["about"] for item in record["findings"] if item["severity"] == "warning"}
    assert warned <= {"machine"}  # processors differ


def test_json() -> None:
    result = run("--draft", "ngram", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert (record["model"], record["draft"]) == ("paceline/tiny", "ngram")
    codes = [item["code"] for item in record["findings"]]
    assert "draft-free" in codes and codes.count("logits-equal") == 1


def test_an_error_is_exit_code_one(broken: str, tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    result = run("--draft", broken, "--report", str(report))
    assert result.exit_code == 1
    assert "1 error," in result.stdout
    text = report.read_text()
    assert "lacks the weight lm_head.weight" in text


def test_logits_that_differ_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.doctor.logits._LIMIT", 0.0)
    result = run("--backend", "reference", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    assert record["findings"][0]["code"] == "logits-differ"
    assert record["errors"] == 1


def test_ctrl_c_leaves_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.lab.doctor.check_logits", interrupted)
    result = run("--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["findings"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    refusals("""
    --model /nowhere/at/all | does not exist
    --draft eagle3 | needs a head
    --draft ngram:colour=red | no option colour
    --dtype int3 | dtype is 'int3'
    --report x.pdf | .md or .html
    """),
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    assert_one_line(run(*arguments), words)

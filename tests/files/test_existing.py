"""Commands refuse to replace what exists, before the work; with --force they replace it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.train.draft import DraftTrainer
from support.full_disk import content_of
from support.training_runs import write_words

MINE = b"my own words\n"


def planted(folder: Path) -> dict[str, bytes]:
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_bytes(MINE)
    return content_of(folder)


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(*_: Any, **__: Any) -> None:
        raise AssertionError("refused only after the work")

    monkeypatch.setattr("paceline.lab.quantize.load_module", loads)
    monkeypatch.setattr("paceline.cli.options.load_llm", loads)
    monkeypatch.setattr(DraftTrainer, "prepare", loads)


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(
    "command",
    [
        "quantize paceline/tiny --to int8 --out {}",
        "train draft --data corpus.jsonl --out {}/.. --steps 2",
        "bench --model paceline/tiny --report {}/thesis.md",
        "tune --model paceline/tiny --out {}/thesis.md --force --report {}/thesis.md",
        "certify --model paceline/tiny --report {}/thesis.md",
        "doctor --model paceline/tiny --report {}/thesis.md",
        "profile --model paceline/tiny --report {}/thesis.md",
        "profile --model paceline/tiny --trace {}/thesis.json",
    ],
)
def test_commands_refuse_before_the_work(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_words(tmp_path / "corpus.jsonl")
    folder = tmp_path / "model"
    planted(folder)
    for name in ("thesis.md", "thesis.json"):
        (folder / name).write_bytes(MINE)
    before = content_of(folder)
    words = command.replace(" --force", "").format(*[folder] * 2).split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert "exists already" in result.stderr and "--force" in result.stderr
    assert content_of(folder) == before


def test_quantize_with_force(tmp_path: Path) -> None:
    out, few = tmp_path / "model", tmp_path / "few.jsonl"
    few.write_text(json.dumps({"text": "Once upon a time, there was a little girl. " * 9}))
    planted(out)
    words = ["quantize", "paceline/tiny", "--to", "int8", "--out", str(out), "--evaluate", str(few)]
    assert CliRunner().invoke(app, words).exit_code == 1
    result = CliRunner().invoke(app, [*words, "--force"])
    assert result.exit_code == 0, result.output
    assert not (out / "thesis.txt").exists() and (out / "model.safetensors").is_file()


def test_export_and_datastore_with_force(tmp_path: Path) -> None:
    out, words = tmp_path / "out", tmp_path / "words.txt"
    planted(out)
    words.write_text("Once upon a time, there was a little girl. " * 9)
    export = ["export", "--model", "paceline/tiny", "--to", "openvino", "--draft", "ngram"]
    datastore = ["datastore", "build", str(words), "--model", "paceline/tiny"]
    for command, path in ((export, out), (datastore, words)):
        refused = CliRunner().invoke(app, [*command, "--out", str(path)])
        assert refused.exit_code == 1 and "exists already" in refused.stderr
        done = CliRunner().invoke(app, [*command, "--out", str(path), "--force"])
        assert done.exit_code == 0, done.output
    assert (out / "run.sh").is_file() and (out / "thesis.txt").read_bytes() == MINE

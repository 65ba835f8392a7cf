"""``paceline train draft``: options, output, card, and errors in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from support.command_lines import paceline
from support.tiny_models import SENTENCES, TinyPair
from support.training_runs import SHORTEST, SMALLEST, options, write_records

SIZES = options(micro_tokens=64, held_out=2, held_out_tokens=12, **SMALLEST, **SHORTEST)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_records(tmp_path_factory.mktemp("corpus") / "toy.jsonl", SENTENCES * 8)


run = partial(paceline, "train", "draft")


def test_a_run_ends_with_a_draft_that_the_engine_takes(
    corpus: str, tiny_pair: TinyPair, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = ["--model", tiny_pair.target, "--data", corpus, "--valid", corpus, *SIZES]
    result = run(*arguments, "--out", str(out), "--steps", "3", "--eval-every", "2", "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert record["steps"] == 3 and record["model"] == str(out / "model")
    assert 1 <= record["mean_accepted_length"] <= 5
    assert set(record["acceptance"]) == {"toy"}
    assert "tokens per target step (toy " in result.stderr
    card = Path(record["card"]).read_text()
    for words in ("A draft model for `target`", "| `toy.jsonl` | 1 | MIT 40 |", "position 4"):
        assert words in card
    assert str(tmp_path) not in card
    drafted = paceline(
        "generate", "The dog", "--model", tiny_pair.target, "--draft", record["model"]
    )
    assert drafted.exit_code == 0, drafted.output


def test_errors_take_one_line(corpus: str, tiny_pair: TinyPair, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    files = ["--model", tiny_pair.target, "--data", corpus]
    data = [*files, *SIZES, "--steps", "1"]
    assert run(*data, "--out", out).exit_code == 0
    cases = {
        "other options (tv_weight)": [*data, "--out", out, "--tv-weight", "1"],
        "vocabulary entries": [*files, "--out", out + "2", "--init", tiny_pair.foreign],
        "does not exist": ["--data", "no.jsonl", "--out", out + "3"],
    }
    for words, arguments in cases.items():
        result = run(*arguments)
        assert result.exit_code == 1, result.output
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ") and words in line
    assert not (tmp_path / "run2").exists()

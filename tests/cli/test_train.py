"""``paceline train draft``: options, output, interruption and resumption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_lines import paceline
from support.training_runs import SHORTEST, SMALLEST, check_ctrl_c, options, write_records

SIZES = options(micro_tokens=64, held_out=1, held_out_tokens=8, **SMALLEST, **SHORTEST)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("corpus") / "toy.jsonl"
    return write_records(path, ["The dog saw the cat and the cat saw the dog."] * 40)


def test_a_run_ends_with_a_json_line_and_a_card(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "draft", "--data", corpus, "--valid", corpus, "--out", str(out), *SIZES]
    result = paceline(*arguments, "--steps", "3", "--eval-every", "2", "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    record = json.loads(line)
    assert record["steps"] == 3
    assert record["model"] == str(out / "model")
    assert set(record["acceptance"]) == {"toy"}
    assert record["config"]["hidden_size"] == 16
    assert Path(record["card"]).read_text().startswith("# Model card")
    assert (out / "model" / "model.safetensors").is_file()

    again = paceline(*arguments, "--steps", "4")
    assert again.exit_code == 0, again.output
    assert "resuming at step 3 of 4" in again.stderr


@pytest.mark.slow  # a process is interrupted
def test_ctrl_c_saves_and_the_same_command_resumes(corpus: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["train", "draft", "--data", corpus, "--valid", corpus, "--out", str(out), *SIZES]
    assert check_ctrl_c(arguments, "per target step") >= 5

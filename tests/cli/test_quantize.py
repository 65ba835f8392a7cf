"""``paceline quantize``: a folder that loads again, and one line for what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_lines import paceline


def run(*arguments: str) -> tuple[int, str, str]:
    result = paceline("quantize", *arguments)
    return result.exit_code, result.stdout, result.stderr


def test_a_checkpoint_and_what_it_costs(tmp_path: Path) -> None:
    out, few = tmp_path / "eight", tmp_path / "few.jsonl"
    few.write_text(json.dumps({"text": "Once upon a time, there was a little girl. " * 9}))
    about = ["paceline/tiny", "--evaluate", str(few)]
    code, stdout, _ = run(*about, "--to", "int8", "--out", str(out), "--json")
    assert code == 0
    record = json.loads(stdout)
    assert record["precision"] == "int8" and record["rounding"] == "nearest"
    assert record["layers"] > 0 and abs(record["perplexity_rise"]) < 0.01
    assert record["bytes_before"] == 18_874_368  # in bf16
    assert record["bytes_after"] < record["bytes_before"] * 0.51
    generated = paceline(
        "generate", "Once upon a time", "--model", str(out), "--max-tokens", "8", "--json"
    )
    assert generated.exit_code == 0 and json.loads(generated.stdout)["text"]
    text = run(*about, "--to", "int4", "--out", str(tmp_path / "four"))[1]
    assert "perplexity" in text and "linear layers" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["paceline/tiny", "--to", "int3"],
            "precision 'int3' is not known; use int8, int4 or w4a16",
        ),
        (["nowhere/at/all", "--to", "int8"], "does not exist"),
        (["paceline/tiny", "--to", "int4", "--calibrate", "none.jsonl"], "none.jsonl"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    code, _, stderr = run(*arguments, "--out", str(tmp_path / "out"))
    assert code != 0
    assert message in stderr and "Traceback" not in stderr
    assert not (tmp_path / "out").exists()

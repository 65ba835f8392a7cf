"""``paceline export`` and ``--draft @FILE`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command_lines import paceline

PAIR = ["--model", "paceline/tiny", "--draft", "ngram:candidates=1", "--draft-length", "4"]


def run(*words: str, code: int = 0) -> tuple[str, str]:
    result = paceline("export", *words)
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def test_the_command_line_goes_to_standard_output() -> None:
    out, said = run("--to", "vllm", *PAIR)
    assert out.startswith("vllm serve ") and '"method": "ngram"' in out
    assert len(out.splitlines()) == 1
    assert said.splitlines()[-1] == "checked against vllm 0.32.0"


def test_what_is_approximated_is_said(tmp_path: Path) -> None:
    _, said = run("--to", "sglang", *PAIR, "--out", str(tmp_path / "there"))
    assert "approximated: matches of " in said and ": a trie over all requests" in said
    assert {file.name for file in (tmp_path / "there").iterdir()} == {"run.sh", "export.json"}


def test_a_head_that_the_command_needs_is_named() -> None:
    """The command was printed without a word about the head that only --out writes."""
    head = ["--model", "paceline/tiny", "--draft", "eagle3:paceline/tiny-eagle3"]
    assert "give --out FOLDER to get the converted head" in run("--to", "vllm", *head)[1]
    assert "nothing was written" not in run("--to", "vllm", *PAIR)[1]


def test_json() -> None:
    out, _ = run("--to", "sglang", *PAIR, "--json")
    record = json.loads(out)
    assert record["config"]["speculative_algorithm"] == "NGRAM"
    assert record["engine"] == "sglang"


@pytest.mark.parametrize(("to", "named"), [("tgi", "cannot export"), ("llm", "cannot export")])
def test_engines_that_cannot_be_exported_to(to: str, named: str) -> None:
    _, said = run("--to", to, *PAIR, code=1)
    assert named in said and len(said.splitlines()) == 1


def test_a_vllm_config_as_the_draft_of_another_engine(tmp_path: Path) -> None:
    file = tmp_path / "vllm.json"
    spec = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    file.write_text(json.dumps(spec))
    out, _ = run("--to", "llama.cpp", "--model", "paceline/tiny", "--draft", f"@{file}")
    assert "--spec-ngram-simple-size-n 2 --spec-ngram-simple-size-m 3" in out

"""``paceline export`` and ``--draft @FILE`` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.settings import tuned
from paceline.settings.tuned import ModelIdentity, TunedSettings
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
    _, said = run("--to", "openvino", *PAIR, "--out", str(tmp_path / "there"))
    assert "approximated: 1 candidates from both: one match; " in said
    assert {file.name for file in (tmp_path / "there").iterdir()} == {
        "run.sh",
        "export.json",
        "openvino_generate.py",
    }


def test_force_leaves_nothing_of_an_earlier_export(tmp_path: Path) -> None:
    """A head of before lay beside a command that does not use it."""
    out, head = tmp_path / "there", ["--model", "paceline/tiny", "--draft-length", "4"]
    eagle = [*head, "--draft", "eagle3:paceline/tiny-eagle3"]
    run("--to", "tensorrt-llm", *eagle, "--out", str(out))
    (out / "head" / "old").touch()
    (out / "mine").touch()
    run("--to", "vllm", *eagle, "--out", str(out), "--force")
    written = {"run.sh", "export.json", "vllm.json", "mine"}
    assert {file.name for file in out.iterdir()} == {*written, "head"}
    assert not (out / "head" / "old").exists()
    # What the command uses is kept.
    kept = ["--draft", f"eagle3:{out / 'head'}", "--out", str(out), "--force"]
    run("--to", "llama.cpp", *head, *kept)
    assert (out / "head" / "model.safetensors").exists()
    run("--to", "vllm", *eagle, "--out", str(out), "--force")
    run("--to", "vllm", *PAIR, "--out", str(out), "--force")
    assert {file.name for file in out.iterdir()} == written
    for damaged in ({"files": 7, "head": 7}, {"files": {"../there/mine": "", "..": ""}}):
        (out / "export.json").write_text(json.dumps(damaged))
        run("--to", "vllm", *PAIR, "--out", str(out), "--force")
    assert {file.name for file in out.iterdir()} == written


def test_files_that_the_command_needs_are_named() -> None:
    """The command was printed without a word about the file that only --out writes."""
    for to, file in (("tensorrt-llm", "tensorrt_llm.yaml"), ("openvino", "openvino_generate.py")):
        out, said = run("--to", to, *PAIR)
        assert file in out and f"nothing was written; give --out FOLDER to get {file}" in said
    assert "nothing was written" not in run("--to", "vllm", *PAIR)[1]


def test_json() -> None:
    out, _ = run("--to", "tensorrt-llm", *PAIR, "--json")
    record = json.loads(out)
    assert record["config"]["speculative_config"]["decoding_type"] == "NGram"
    assert record["engine"] == "tensorrt-llm"


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


def test_the_winner_of_tune(tmp_path: Path) -> None:
    made = TunedSettings(
        tuned.VERSION,
        ModelIdentity("paceline/tiny", "unread"),
        tuned.DraftChoice("ngram:max=3", 3),
        tuned.EngineChoice(5),
    )
    made.write(tmp_path / "tuned.toml")
    words = ("--model", "paceline/tiny", "--config", str(tmp_path / "tuned.toml"))
    out, _ = run("--to", "vllm", *words)
    assert '"num_speculative_tokens": 3' in out and '"prompt_lookup_max": 3' in out
    assert "--max-num-seqs 5" in out

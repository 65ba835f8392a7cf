"""`make gpu-check`, as far as it runs without a GPU: its script on the processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gpu_check


@pytest.mark.slow
def test_the_script_runs_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ROWS", (1, 2))
    file = tmp_path / "found.json"
    words = ["--device", "cpu", "--only", "none", "ngram", "--json", str(file)]
    assert gpu_check.main(words) == 0
    found = json.loads(file.read_text())
    assert found == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["differ"] == [] and found["logits_apart"] == 0
    assert found["graph_seconds"] == {"1": "no CUDA device", "8": "no CUDA device"}


def test_a_different_text_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"greedy": [[1]], "seeded": [[2]]}, {"greedy": [[1]], "seeded": [[3]]}])
    monkeypatch.setattr(gpu_check, "texts", lambda llm: next(answers))
    monkeypatch.setattr(gpu_check, "ROWS", (1,))
    assert gpu_check.main(["--device", "cpu", "--only", "none"]) == 1

"""``--seconds`` and Ctrl-C of the measuring commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.lab.certify.run import Certifier
from support.command_lines import paceline
from support.tiny_models import TinyPair


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "three.txt"
    texts = ("Once upon a time there was", "The quick brown fox", "one two one two one two")
    file.write_text("\n---\n".join(texts), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def certify(tiny_pair: TinyPair, prompts: str) -> list[str]:
    pair = ["--model", tiny_pair.target, "--draft", tiny_pair.draft, "--dtype", "float32"]
    small = ["--num-prompts", "2", "--max-tokens", "8", "--prefixes", "1", "--samples", "200"]
    return ["certify", *pair, "--draft-length", "2", "--prompts", prompts, *small, "--json"]


@pytest.fixture(scope="module")
def bench(prompts: str) -> list[str]:
    few = ["--rounds", "1", "--max-tokens", "6", "--per-category", "2", "--prompts", prompts]
    return ["bench", "-m", "ngram@2", *few, "--json"]


@pytest.fixture
def tune(prompts: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr("paceline.lab.tune.plan.MIN_BATCH_SIZE", 2)
    small = ["--draft", "ngram", "--draft-only", "--max-tokens", "9", "--rounds", "1"]
    return ["tune", *small, "--prompts", prompts, "--out", str(tmp_path / "p.toml"), "--json"]


# -- too little time ------------------------------------------------------------------------------


def test_no_time_is_neither_a_pass_nor_a_failure(certify: list[str]) -> None:
    result = paceline(*certify, "--seconds", "0.001")
    assert result.exit_code == 3, result.output
    record = json.loads(result.stdout)
    assert not record["lossless"] and not record["complete"] and record["problems"] == []
    assert record["verdict"].startswith("NOT ENOUGH: ")


def test_a_benchmark_without_time_says_so(bench: list[str]) -> None:
    result = paceline(*bench, "--seconds", "0.001")
    assert result.exit_code == 3 and result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "0.001 s were not enough to measure anything" in line and "--seconds" in line


def test_a_tuning_without_time_writes_nothing(tune: list[str], tmp_path: Path) -> None:
    result = paceline(*tune, "--seconds", "0.001")
    assert result.exit_code == 3, result.output
    record = json.loads(result.stdout)
    assert not record["confirmed"] and record["config"] is None
    assert record["budget"]["missing"] == ["ngram"]
    assert not (tmp_path / "p.toml").exists()
    assert "no tuned settings were written" in result.stderr
    whole = paceline(*tune, "--seconds", "0")
    assert whole.exit_code == 0, whole.output
    assert json.loads(whole.stdout)["budget"]["missing"] == []
    assert (tmp_path / "p.toml").exists()


# -- Ctrl-C ---------------------------------------------------------------------------------------


def test_ctrl_c_shows_what_was_measured(
    certify: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Certifier.run

    def interrupted(self: Certifier, advance: object) -> None:
        count = 0

        def soon(what: str) -> None:
            nonlocal count
            count += 1
            if count == 4:
                raise KeyboardInterrupt

        whole(self, soon)

    monkeypatch.setattr(Certifier, "run", interrupted)
    first = paceline(*certify, "--seconds", "0")
    assert first.exit_code == 130
    assert json.loads(first.stdout)["texts"][0]["texts"] == 1

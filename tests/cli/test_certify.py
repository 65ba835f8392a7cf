"""``paceline certify``: exit status, JSON, report, and bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.kernels.lookup import functions
from paceline.lab.certify.certificate import Problem
from paceline.lab.certify.run import Certifier
from support.command_lines import assert_one_line, paceline
from support.planted_server import PlantedServer, served
from support.tiny_models import TinyPair
from support.wrong_rules import without_residual


@pytest.fixture(scope="module")
def arguments(tiny_pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    prompts = tmp_path_factory.mktemp("prompts") / "two.txt"
    prompts.write_text("Once upon a time there was\n---\nThe quick brown fox", encoding="utf-8")
    pair = ["--model", tiny_pair.target, "--draft", tiny_pair.draft, "--dtype", "float32"]
    small = ["--num-prompts", "2", "--max-tokens", "8", "--prefixes", "1", "--samples", "1200"]
    return ["certify", *pair, "--draft-length", "2", "--prompts", str(prompts), *small]


def test_tables_report_and_exit_status(arguments: list[str], tmp_path: Path) -> None:
    report = tmp_path / "r.html"
    result = paceline(*arguments, "--report", str(report))
    assert result.exit_code == 0, result.output
    for words in ("Token for token", "Distribution", "The rule, enumerated", "CERTIFIED: "):
        assert words in result.stdout
    assert "NOT" not in result.stdout
    assert "CERTIFIED: " in report.read_text(encoding="utf-8")


def test_json(arguments: list[str]) -> None:
    result = paceline(*arguments, "--json", "--top-p", "0.9", "--frequency-penalty", "0.3")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["lossless"] is True and record["problems"] == []
    assert record["sampling"]["top_p"] == 0.9
    assert {check["kind"] for check in record["texts"]} == {"greedy", "seeded"}
    assert all(0 <= test["p_value"] <= 1 for test in record["tests"])
    assert 0 < record["smallest_bias"] < 1
    assert all(check["passed"] and check["outcomes"] > 50 for check in record["exact"])
    assert record["exact"][0]["draw"] == "iid"


def test_a_problem_is_named_and_fails(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Certifier, advance: object) -> None:
        self.problems.append(Problem("rule", "something is wrong"))

    monkeypatch.setattr(Certifier, "run", broken)
    result = paceline(*arguments)
    assert result.exit_code == 1
    assert "NOT LOSSLESS: rule: something is wrong" in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(functions() is None, reason="the kernels are not there")
def test_a_missing_residual_is_found_at_default_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passed: the bias was smaller than what so many samples see."""
    monkeypatch.setattr("paceline.verify.verifier.decide_in_kernels", without_residual)
    pair = ["--model", "paceline/tiny", "--draft", "paceline/tiny-draft"]
    result = paceline("certify", *pair, "--json")
    assert result.exit_code == 1, result.output
    record = json.loads(result.stdout)
    assert record["verdict"].startswith("NOT LOSSLESS: ")
    assert "rule" in {problem["part"] for problem in record["problems"]}
    assert not any(check["passed"] for check in record["exact"])


def test_ctrl_c_shows_what_there_is(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Certifier, advance: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Certifier, "run", interrupted)
    result = paceline(*arguments)
    assert result.exit_code == 130
    assert "NOT ENOUGH: " in result.stdout


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--draft", "none"], 2, "there is no draft to certify"),
        (["--samples", "3"], 2, "Invalid value for '--samples'"),
        (["--temperature", "-1"], 1, "error: temperature is -1.0; it must be from 0"),
        (["--report", "r.pdf"], 1, "error: report 'r.pdf': end its name in .md or .html"),
    ],
)
def test_bad_input(arguments: list[str], more: list[str], code: int, message: str) -> None:
    result = paceline(*arguments, *more)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_server_behind_a_url() -> None:
    few = ["--requests", "120", "--max-tokens", "12", "--json"]
    with served(PlantedServer("zeros")) as broken, served(PlantedServer(seed=8)) as other:
        result = paceline("certify", "--url", other, "--against", other, *few)
        assert result.exit_code == 0, result.output
        record = json.loads(result.stdout)
        assert record["lossless"] and record["server"].startswith("planted at http://127")
        result = paceline("certify", "--url", broken, "--model", "planted", *few)
        assert result.exit_code == 1
        assert "logprobs" in {problem["part"] for problem in json.loads(result.stdout)["problems"]}
        result = paceline("certify", "--url", other, "--requests", "2")
        assert result.exit_code == 3 and "NOT ENOUGH: " in result.stdout
    result = paceline("certify", "--url", "http://127.0.0.1:9")
    assert_one_line(result, "no server answers at http://127.0.0.1:9/v1: ")
    result = paceline("certify", "--url", other, "--draft", "ngram")
    assert_one_line(result, "--draft is for an engine of this machine")
    assert paceline("certify", "--against", other).exit_code == 2

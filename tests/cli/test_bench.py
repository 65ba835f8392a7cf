"""``paceline bench``: table, JSON, report, failures and bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import Result

from paceline import LLM
from paceline.cli.options import ModelOptions
from paceline.lab.bench.engines import EngineFactory
from paceline.lab.bench.runner import BenchEngine, BenchRequest, Method, TimedRun
from support.command_lines import assert_one_line, paceline, refusals
from support.made_outcomes import Fake
from support.tiny_models import TinyPair

FEW = ["--rounds", "1", "--per-category", "1", "--category", "chat", "--category", "code"]
SHORT = ["--max-tokens", "12"]


run = partial(paceline, "bench", COLUMNS="120")


def test_the_embedded_pair(tmp_path: Path) -> None:
    report = tmp_path / "bench.html"
    methods = ["-m", "draft@3", "-m", "ngram@2"]
    result = run(*FEW, *SHORT, *methods, "--concurrency", "1,2", "--json", "--report", str(report))
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    names = [method["name"] for method in record["methods"]]
    assert names == ["plain", "draft@3", "ngram@2"]
    assert {row["category"] for row in record["figures"]} == {
        *("chat", "code", "overall", "all prompts")
    }
    overall = {r["method"]: r for r in record["figures"] if r["category"] == "overall"}
    assert overall["plain"]["speedup"]["median"] == 1
    assert overall["plain"]["tokens"] == 2 * 12
    assert overall["draft@3"]["drafts"]["mean_accepted_length"] > 1
    for row in record["figures"]:
        assert row["tokens_per_second"]["low"] <= row["tokens_per_second"]["median"]
        assert row["time_to_first_token"] > 0 and row["inter_token_p99"] >= row["inter_token_p50"]
        assert len(row["drafts"]["acceptance"]) == len(row["drafts"]["reached"])
    assert record["bugs"] == []
    assert record["machine"]["threads"] and record["settings"]["concurrency"] == [1, 2]
    assert {"dtype", "quantize", "draft_quantize"} <= record["settings"].keys()
    text = report.read_text(encoding="utf-8")
    for title in ("Methods", "Acceptance by position", "Latency"):
        assert f"<h2>{title}</h2>" in text


def test_tables_and_markdown(tiny_pair: TinyPair, tmp_path: Path) -> None:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text(
        '{"question_id": 1, "category": "a", "turns": ["one two one two one two"]}\n'
        '{"question_id": 2, "category": "b", "turns": ["three four three four"]}\n'
    )
    report = tmp_path / "bench.md"
    pair = ["--model", tiny_pair.target, "--draft", tiny_pair.draft, "--dtype", "float32"]
    result = run(
        *pair,
        *("--prompts", str(prompts), "--rounds", "2", "--max-tokens", "24"),
        *("-m", "draft@2", "-m", "ngram", "--concurrency", "1,2"),
        *("--temperature", "0,1", "--seed", "3"),
        *("--report", str(report), "--details"),
    )
    assert result.exit_code == 0, result.output
    for words in ("By category", "Acceptance by position", "Same text"):
        assert words in result.stdout, words
    text = report.read_text(encoding="utf-8")
    assert "## By category at temperature 1" in text and "| position 2 |" in text


HEADS = ("eagle3:paceline/tiny-eagle3", "model:paceline/tiny-draft")


def test_without_methods_those_at_hand_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: EngineFactory, method: Method, clients: int, **_: object) -> BenchEngine:
        return Fake(method.name, drafted=2, accepted=1)

    monkeypatch.setattr(EngineFactory, "create", busy)
    for arguments, expected in (
        ([], ["plain", "draft", "ngram", *HEADS]),
        (["--draft", "suffix"], ["plain", "draft", "ngram"]),
        (["--draft", "none"], ["plain", "ngram"]),
    ):
        result = run(*FEW, *arguments, "--json")
        assert result.exit_code == 0, result.output
        assert [method["name"] for method in json.loads(result.stdout)["methods"]] == expected


def test_the_options_of_drafts_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were ignored: the draft was measured unquantised."""
    used: list[dict[str, Any]] = []
    with_draft = LLM.with_draft

    def noted(self: LLM, draft: Any = None, **settings: Any) -> LLM:
        used.append(settings)
        return with_draft(self, draft, **settings)

    monkeypatch.setattr(LLM, "with_draft", noted)
    options = [
        "--draft-quantize",
        "int4",
        "--drafting",
        "throughput",
        "--strict",
        "--draft-length",
        "2",
    ]
    result = run(*FEW, "-m", "draft", "--draft", "paceline/tiny-draft", *options, "--json")
    assert result.exit_code == 0, result.output
    wanted = {"draft_quantize": "int4", "drafting": "throughput", "strict": True}
    assert [settings["draft_length"] for settings in used] == [0, 2]
    assert all(settings.items() >= wanted.items() for settings in used)


def test_tuned_settings_give_what_the_options_leave_open(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(draft=SimpleNamespace(spec="ngram", length=3))
    monkeypatch.setattr("paceline.settings.tuned.TunedSettings.read", lambda path: settings)
    for options, expected in (
        (ModelOptions(config="p"), (3, "auto")),
        (ModelOptions(config="p", draft="suffix"), ("auto", "auto")),
        (ModelOptions(config="p", draft_length=2, rule="token"), (2, "token")),
        (ModelOptions(), ("auto", "auto")),
    ):
        assert options.length_and_rule == expected


class Liar:
    """Puts a wrong token into every answer of another engine."""

    def __init__(self, honest: BenchEngine) -> None:
        self.name, self._honest = honest.name, honest

    def refresh(self) -> None:
        self._honest.refresh()

    def run(self, requests: list[BenchRequest]) -> TimedRun:
        outcome = self._honest.run(requests)
        answers = [
            replace(answer, tokens=(*answer.tokens[:3], 0, *answer.tokens[4:]))
            for answer in outcome.answers
        ]
        return replace(outcome, answers=answers)


def test_another_text_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    start = EngineFactory.create

    def lying(self: EngineFactory, method: Method, clients: int) -> Any:
        honest = start(self, method, clients)
        return Liar(honest) if method.name == "ngram@4" else honest

    monkeypatch.setattr(EngineFactory, "create", lying)
    result = run(*FEW, *SHORT, "-m", "ngram@4", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)  # the result is still shown
    assert record["bugs"] == ["ngram@4"]
    (line,) = errors(result)
    assert "the text of ngram@4 differs from plain decoding" in line and "bug" in line


def fakes(monkeypatch: pytest.MonkeyPatch, **opened_all: Fake) -> None:
    monkeypatch.setattr(
        EngineFactory, "create", lambda self, method, clients: opened_all[method.name]
    )


def errors(result: Result) -> list[str]:
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


def test_a_method_that_did_nothing_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes(monkeypatch, plain=Fake("plain"), ngram=Fake("ngram"))
    result = run(*FEW, "-m", "ngram")
    assert result.exit_code == 0
    assert "Methods" in result.stdout and "Verdict" not in result.stdout
    assert "ngram drafted nothing in the whole run" in " ".join(result.stdout.split())


def test_ctrl_c_shows_what_was_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    last = Fake("ngram", drafted=2, accepted=1, interrupted_at=3)  # warm-up, one prompt, then
    fakes(monkeypatch, plain=Fake("plain"), ngram=last)
    result = run(*FEW, "-m", "ngram", "--json")
    assert result.exit_code == 130
    record = json.loads(result.stdout)
    assert record["interrupted"]
    assert {row["category"] for row in record["figures"]} == {"chat"}
    assert "interrupted" in result.stderr


def test_ctrl_c_before_anything_was_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes(monkeypatch, plain=Fake("plain", interrupted_at=1), ngram=Fake("ngram"))
    result = run(*FEW, "-m", "ngram", "--json")
    assert result.exit_code == 130 and result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    refusals("""
    -m ngrm | no drafter 'ngrm' and no model folder 'ngrm'; did you mean ngram
    -m transformers:assisted | no drafter 'transformers'
    -m draft --draft none | no draft is named
    --category cooking | no category cooking in the shipped prompt set; there are
    --prompts /nowhere.jsonl | /nowhere.jsonl
    --report x.pdf | .md or .html
    --max-tokens 2000 | room for 2000 new tokens in the context of paceline/tiny, 1024 tokens: the
    -m model:/no/where | /no/where
    """),
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    assert_one_line(run("--rounds", "1", *arguments), words)


@pytest.mark.parametrize(
    ("flag", "texts"),
    [
        ("--draft-length", ["", "1,x", "0", "0,1", "65", "1,65", "1,,2"]),
        ("--concurrency", ["", "0", "1,x", "1.5"]),
        ("--temperature", ["", "-1", "hot", "nan", "inf"]),
    ],
)
def test_bad_numbers_are_usage_errors(flag: str, texts: list[str]) -> None:
    for text in texts:
        result = run(flag, text, COLUMNS="200")
        assert result.exit_code == 2 and f"{flag} is '{text}'" in result.stderr, result.output


def test_a_file_without_prompts(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    result = run("--prompts", str(empty))
    assert result.exit_code == 1 and len(result.stderr.strip().splitlines()) == 1

"""The demo: its figures, its table and its honesty about differences."""

from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from paceline import LLM, SamplingParams
from paceline.cli import demo as demo_module
from paceline.core.sequence import DraftCounts
from paceline.engine.clock import PHASES
from paceline.engine.driver import StepTotals
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.demo import PROMPTS, Measurement, demo_table, total, with_memory
from paceline.lab.report.render import print_table
from support.command_lines import paceline
from support.pulled_model import plant
from support.tiny_models import TinyPair

TOY = load_prompts(PROMPTS / "toy.jsonl")


def decoded(tokens: int, seconds: float) -> StepTotals:
    return StepTotals(tokens=tokens, seconds=dict.fromkeys(PHASES, seconds / len(PHASES)))


def measurement(name: str, identical: bool = True) -> Measurement:
    counts = DraftCounts(
        **{"drafted": 80, "accepted": 60, "target_steps": 40},
        by_drafter={"ngram": 40, "suffix": 20},
        not_drafted={"too dear": 3},
    )
    return Measurement(name, decoded(100, 2.0), decoded(100, 1.0), counts, identical)


def unaided(tokens: int, plain: float, fast: float, drafted: int = 0) -> Measurement:
    """A scene in which nothing was accepted: the tokens of its answer, and seconds of both."""
    silent = {} if drafted else {"too dear": tokens}
    counts = DraftCounts(target_steps=tokens, drafted=drafted, not_drafted=silent)
    return Measurement("y", decoded(100, plain), decoded(tokens, fast), counts, True)


def test_figures() -> None:
    item = measurement("x")
    assert item.plain.rate == 50
    assert item.fast.rate == 100
    assert item.speedup == 2
    assert item.counts.acceptance_rate == 0.75
    assert item.mean_accepted_length == 2.5


def test_no_draft_is_not_an_acceptance_of_zero() -> None:
    assert unaided(100, 6.0, 4.0).counts.acceptance_rate is None
    assert unaided(100, 6.0, 4.0, 9).counts.acceptance_rate == 0


def test_the_table_fits_a_usual_terminal() -> None:
    out = io.StringIO()
    items = [measurement("summary")]
    print_table(demo_table([items, items], "auto"), Console(file=out, width=80))
    assert out.getvalue().count("prompt  ") == 1


def test_a_scene_without_drafts_says_so() -> None:
    silent = unaided(100, 6.0, 4.0)
    assert silent.in_words == "No draft was accepted: too dear."
    out = io.StringIO()
    print_table(demo_table([[silent]], "d"), Console(file=out, width=200))
    assert "None" not in out.getvalue() and "0%" not in out.getvalue()


def test_total_adds_tokens_and_seconds() -> None:
    slow = unaided(100, 6.0, 4.0, 20)
    whole = total([measurement("x"), slow])
    assert whole.fast.tokens == 200
    assert whole.speedup == 8 / 5
    assert whole.counts.acceptance_rate == 0.6
    assert whole.counts.by_drafter == {"ngram": 40, "suffix": 20}
    assert total([measurement("x"), measurement("y")]).counts.not_drafted == {"too dear": 6}
    assert whole.identical and not total([slow, measurement("x", False)]).identical


def test_answers_of_different_lengths_are_compared_by_their_tokens_a_second() -> None:
    """Behind a near tie a shorter answer is no faster one."""
    short = unaided(50, 2.0, 1.0)
    assert short.plain.rate == short.fast.rate == 50
    assert short.speedup == 1
    assert total([short, measurement("y")]).speedup == (150 / 2) / (200 / 4)


@pytest.fixture(scope="module")
def arguments(tiny_pair: TinyPair) -> list[str]:
    pair = ["--model", tiny_pair.target, "--draft", tiny_pair.draft, "--dtype", "float32"]
    return ["demo", *pair, "--draft-length", "2", "--max-tokens", "8"]


def test_json(arguments: list[str]) -> None:
    result = paceline(*arguments, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["identical"] is True
    assert [item["name"] for item in record["prompts"]] == [prompt.name for prompt in TOY]
    assert record["tokens"] == sum(item["tokens"] for item in record["prompts"])
    assert set(record) - {"prompts", "draft"} == set(record["prompts"][0]) - {"name"}
    assert record["plain_tokens_per_second"] > 0


def test_show(arguments: list[str]) -> None:
    result = paceline(*arguments)
    assert result.exit_code == 0, result.output
    for words in (*(prompt.text[:40] for prompt in TOY), "speedup", "identical", "total"):
        assert words in result.stdout
    assert "NO" not in result.stdout and "again" not in result.stdout
    bars = re.findall(r"^speculative ━.*x$", result.stdout, re.MULTILINE)
    assert len(bars) == len(TOY)  # each on a line of its own
    assert re.search(r"Try next: paceline \w+$", result.stdout.strip())


def test_a_sentence_says_which_drafter_did_it() -> None:
    def words(drafters: dict[str, int], accepted: int, reasons: dict[str, int]) -> str:
        counts = DraftCounts(accepted=accepted, by_drafter=drafters, not_drafted=reasons)
        return replace(measurement("x"), counts=counts).in_words

    several = {"ngram": 3, "quantized": 40, "suffix": 0, "mine": 7}
    assert words(several, 50, {}) == (
        "50 of 100 tokens came from drafts: 40 by quantized, 7 by mine, 3 by ngram."
    )
    assert words({}, 9, {}) == "9 of 100 tokens came from drafts."
    assert words({}, 0, {"a": 1, "would not pay": 7}) == "No draft was accepted: would not pay."
    assert words({}, 0, {}) == "No draft was accepted."


def test_both_take_turns_on_clocks_of_their_own(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody's time holds the other's, or the drawing."""
    plain = LLM(tiny_pair.target, dtype="float32", draft="none")
    fast = plain.with_draft(tiny_pair.draft, draft_length=2)
    monkeypatch.setattr(demo_module, "_bars", lambda *drives: time.sleep(0.05) or "")
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    start = time.perf_counter()
    prompt: Any = SimpleNamespace(name="x", encode=lambda llm: [1, 2, 3])
    result = demo_module.measure(Console(quiet=True), plain, fast, prompt, params, False)
    assert result.plain.tokens == result.fast.tokens == 12
    assert result.identical
    assert result.plain.whole + result.fast.whole < time.perf_counter() - start - 0.05


def test_a_difference_is_shown(random_pair: tuple[str, str]) -> None:
    target, other = (LLM(model, "none", dtype="float32") for model in random_pair)
    prompt: Any = SimpleNamespace(name="x", encode=lambda llm: [1, 2, 3])
    out, params = io.StringIO(), SamplingParams(max_tokens=12, ignore_eos=True)
    result = demo_module.measure(Console(file=out), target, other, prompt, params, False)
    assert not result.identical and "The texts differ." in out.getvalue()
    print_table(demo_table([[result]], "auto"), Console(file=out, width=120))
    assert "NO" in out.getvalue()


# -- the real model ----------------------------------------------------------------------------

QUICK = ["demo", "--dtype", "float32", "--max-tokens", "24"]


def test_the_real_model_is_asked_real_questions_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    """A second time the lookups know the answer: a step yields more than one token."""
    plant(monkeypatch, tmp_path, tiny_pair.target)
    opened = LLM.__init__

    def fixed(self: LLM, *given: Any, **named: Any) -> None:
        opened(self, *given, **{**named, "draft_length": 4})  # whether it pays is another matter

    monkeypatch.setattr(LLM, "__init__", fixed)
    result = paceline(*QUICK, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    names = ["fact", "code", "summary", "list", "story"]
    assert [item["name"] for item in record["prompts"]] == names
    again = record["repeated"]
    assert [item["name"] for item in again["prompts"]] == names
    assert record["identical"] is True and again["identical"] is True
    assert again["tokens"] == record["tokens"]
    assert again["mean_accepted_length"] > max(1.5, record["mean_accepted_length"])
    text = paceline(*QUICK).stdout
    for words in (
        "What is the capital of France",
        "with --draft auto",
        "story again",
        "total",
        "dequantised from a 4-bit file",
    ):
        assert words in text


def test_a_first_answer_is_not_drafted_from_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_pair: TinyPair
) -> None:
    """The first rows are those of requests never seen: the memory begins empty."""
    plant(monkeypatch, tmp_path, tiny_pair.target)
    stored: list[int] = []
    inner = demo_module.measure

    def measured(console: Console, plain: LLM, fast: LLM, *given: Any) -> Any:
        stored.extend(len(memory.memory()) for memory in with_memory(fast))
        return inner(console, plain, fast, *given)

    monkeypatch.setattr(demo_module, "measure", measured)
    result = paceline(*QUICK, "--json", "--draft", "suffix")
    assert result.exit_code == 0, result.output
    assert stored[0] == 0 and stored[1] > 0

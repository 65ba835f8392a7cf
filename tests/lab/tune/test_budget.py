"""A tuning that ends early: every drafter whole or not at all, and honest about the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.core.costs import CostCurve
from paceline.lab.bench.prompts import BenchPrompt
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.candidates import DrafterCandidate, variants
from paceline.lab.tune.plan import TuningOutcome, tune
from paceline.lab.tune.present import decision, report_of, tuning_record
from support.engine_models import write_pair
from support.simulated_clock import Clock

OPTIONS = TuneOptions(concurrency=1, max_tokens=12, rounds=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(Path(tmp_path_factory.mktemp("tune")), noise=0.02)


@pytest.fixture(scope="module")
def llm(folders: tuple[str, str]) -> LLM:
    return LLM(folders[0], draft="none", dtype="float32", max_batch_size=1)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.tune.plan.MIN_BATCH_SIZE", 2)


def prompts() -> list[BenchPrompt]:
    text = "one two three one two three one two three"
    return [BenchPrompt(f"p{n}", f"c{n % 2}", f"{text} {n}", False) for n in range(4)]


def candidates(folders: tuple[str, str]) -> list[DrafterCandidate]:
    return [*variants("ngram"), *variants(f"model:{folders[1]}")[:3], *variants("suffix")]


@pytest.fixture(autouse=True)
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = CostCurve((1, 2), (1e-6, 1e-6))  # a draft as large as the target would not be asked
    monkeypatch.setattr("paceline.build.measure", lambda *_, **__: cheap)


def run(
    llm: LLM, folders: tuple[str, str], seconds: float | None
) -> tuple[TuningOutcome, list[str]]:
    """Each drafter and each round of all take a second."""
    said, clock, outcome = list[str](), Clock(), TuningOutcome(OPTIONS, "m")

    def advance(what: str) -> None:
        said.append(what)
        clock.now += what.startswith("trying ") or what == "confirming: none"

    tune(llm, candidates(folders), prompts(), outcome, advance, Budget(seconds, clock))
    return outcome, said


def test_a_drafter_is_tried_completely_or_not_at_all(llm: LLM, folders: tuple[str, str]) -> None:
    outcome, said = run(llm, folders, 5)
    assert outcome.completed is not None and outcome.completed.spent <= 5
    assert len(outcome.not_tried) == 1 and outcome.completed.missing == tuple(outcome.not_tried)
    tried = [what for what in said if what.startswith("trying ")]
    assert not any(label in what for label in outcome.not_tried for what in tried)
    assert len(tried) == len(outcome.trials) + len(outcome.left_out) == 4
    assert outcome.completed.done["drafters"] == 4 and outcome.completed.wanted["drafters"] == 5
    family = {f"trying {c.label}": c.family for c in candidates(folders)}
    assert len({family[what] for what in tried[:3]}) == 3  # one of each kind, then variants
    assert (
        "Not measured: " in outcome.completed.line
        and "More --seconds measure the rest" in outcome.completed.line
    )
    assert tuning_record(outcome)["budget"]["missing"] == tuple(outcome.not_tried)
    # One round for all had time, which is too little to choose anybody.
    assert len(outcome.job_results) == 1 and outcome.chosen is None
    assert decision(outcome).startswith("Not confirmed: ")
    assert report_of(outcome).sections


def test_the_default_draft_is_confirmed_if_it_loads(llm: LLM, folders: tuple[str, str]) -> None:
    for spec, there in (("suffix", True), ("model:nowhere/at/all", False)):
        default = DrafterCandidate("usual", spec, spec.partition(":")[0], default=True)
        outcome = TuningOutcome(OPTIONS, "m")
        tried = [*variants("ngram"), default]
        tune(llm, tried, prompts(), outcome, lambda what: None)
        confirmed = [result.finalist.label for result in outcome.results]
        assert (confirmed[1:2] == ["usual"]) == there
        assert ("usual" in dict(outcome.left_out)) != there
        assert outcome.completed is not None and outcome.completed.wanted["drafters"] == 1


def test_engines_have_the_memory_given_and_none_is_loaded_when_the_time_is_over(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, with_draft = list[tuple[Any, Any]](), LLM.with_draft

    def recorded(self: LLM, draft: Any = None, **options: Any) -> LLM:
        loaded.append((str(draft), options["kv_cache_memory"]))
        return with_draft(self, draft, **options)

    monkeypatch.setattr(LLM, "with_draft", recorded)
    default = DrafterCandidate("usual", "suffix", "suffix", default=True)
    outcome, budget = TuningOutcome(OPTIONS, "m"), Budget(0.0, Clock())
    tune(llm, [default], prompts(), outcome, lambda what: None, budget, 4 << 20)
    assert [draft for draft, _ in loaded].count("suffix") == 1  # to see that it loads
    assert {memory for _, memory in loaded} == {4 << 20}
    assert outcome.chosen is None and report_of(outcome).sections


def test_two_rounds_confirm(llm: LLM, folders: tuple[str, str]) -> None:
    outcome, _ = run(llm, folders, 8)
    assert outcome.completed is not None and outcome.completed.spent <= 8
    assert len(outcome.not_tried) <= 1 and len(outcome.job_results) == 2
    assert outcome.chosen is not None


def test_an_interrupted_round_does_not_count(llm: LLM, folders: tuple[str, str]) -> None:
    outcome = TuningOutcome(OPTIONS, "m")
    seen: list[str] = []

    def interrupt(what: str) -> None:
        seen.append(what)
        if sum(entry.startswith("confirming") for entry in seen) == 2:
            raise KeyboardInterrupt

    # The default draft is a finalist even if it drafts nothing, as it may on a busy machine.
    default = replace(variants(f"model:{folders[1]}")[0], default=True)
    with pytest.raises(KeyboardInterrupt):
        tune(llm, [default], prompts(), outcome, interrupt)
    assert outcome.results and all(not r.ratios and not r.run.rate for r in outcome.results)
    assert outcome.chosen is None
    assert outcome.completed is not None and not outcome.job_results

"""A tuning that ends early: every drafter whole or not at all, and honest about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.lab.bench.prompts import BenchPrompt
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.measure import (
    Finalist,
    Sample,
    affordable,
    fitting_sample,
    measure_method,
)
from paceline.lab.tune.plan import TuningOutcome, tune
from paceline.lab.tune.present import decision, report_of, tuning_record
from paceline.lab.tune.search import DrafterCandidate, MeasuredMethod, variants
from support.engine_models import write_pair
from support.simulated_clock import Clock, SecondEach
from support.tuning_methods import target

OPTIONS = TuneOptions(concurrency=1, max_tokens=12, rounds=2)
SAMPLE = Sample([[1]] * 4, [[1]] * 16, 8, 48, 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(Path(tmp_path_factory.mktemp("tune")), noise=0.02)


@pytest.fixture(scope="module")
def llm(folders: tuple[str, str]) -> LLM:
    return LLM(folders[0], draft="none", dtype="float32", max_batch_size=1)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.tune.plan.LARGEST_BATCH", 2)


def prompts() -> list[BenchPrompt]:
    text = "one two three one two three one two three"
    return [BenchPrompt(f"p{n}", f"c{n % 2}", f"{text} {n}", False) for n in range(4)]


def candidates(folders: tuple[str, str]) -> list[DrafterCandidate]:
    return [*variants("ngram"), *variants(f"model:{folders[1]}")[:3], *variants("suffix")]


@pytest.fixture(autouse=True)
def exact_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.budget._CAUTION", 1.0)


def run(
    llm: LLM, folders: tuple[str, str], seconds: float | None
) -> tuple[TuningOutcome, list[str]]:
    """Each batch size of the target, each drafter and each round of all take a second."""
    said: list[str] = []
    outcome = TuningOutcome.start(OPTIONS, llm)
    tune(llm, candidates(folders), prompts(), outcome, said.append, SecondEach(seconds))
    return outcome, said


def test_a_drafter_is_measured_whole_or_not_at_all(llm: LLM, folders: tuple[str, str]) -> None:
    outcome, said = run(llm, folders, 6)
    assert outcome.completed is not None and outcome.completed.spent <= 6
    assert len(outcome.not_tried) == 2 and outcome.completed.missing == tuple(outcome.not_tried)
    measured = [what for what in said if what.startswith("measuring ")]
    assert not any(label in what for label in outcome.not_tried for what in measured)
    tried = len(outcome.methods) + len(outcome.left_out)
    assert (tried, outcome.completed.done["drafters"], outcome.completed.wanted["drafters"]) == (
        3,
        3,
        5,
    )
    families = [method.family for method in outcome.methods]
    assert len(set(families)) == len(families)  # first one of each kind, then their variants
    assert (
        "Not measured: " in outcome.completed.line
        and "More --seconds measure the rest" in outcome.completed.line
    )
    assert tuning_record(outcome)["budget"]["missing"] == tuple(outcome.not_tried)
    # One round for all had time, which is too little to choose anybody.
    assert len(outcome.heats) == 1 and outcome.chosen is None
    assert decision(outcome).startswith("Not confirmed: ")
    assert report_of(outcome).sections


def test_no_drafter_takes_more_than_its_share(
    llm: LLM, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = SecondEach(40)

    def slow(beside: LLM, candidate: DrafterCandidate, *rest: Any) -> MeasuredMethod:
        budget.clock.now += 9 if candidate.label == "ngram" else 0
        return measure_method(beside, candidate, *rest)

    monkeypatch.setattr("paceline.lab.tune.measure.measure_method", slow)
    outcome = TuningOutcome.start(OPTIONS, llm)
    tune(llm, candidates(folders), prompts(), outcome, lambda what: None, budget)
    assert outcome.not_tried == ["ngram (stopped, too slow for its share)"]
    assert "ngram" not in {method.family for method in outcome.methods}
    assert len(outcome.methods) + len(outcome.left_out) == 4  # the others had their time
    assert not llm.engine.has_work


def test_a_default_that_does_not_load_is_left_out_and_one_that_does_is_confirmed(
    llm: LLM, folders: tuple[str, str]
) -> None:
    for spec, there in (("suffix", True), ("model:nowhere/at/all", False)):
        default = DrafterCandidate("usual", spec, spec.partition(":")[0], default=True)
        outcome = TuningOutcome.start(OPTIONS, llm)
        tried = [*variants("ngram"), default]
        tune(llm, tried, prompts(), outcome, lambda what: None, SecondEach(None))
        confirmed = [result.finalist.label for result in outcome.results]
        assert (confirmed[1] == "usual") == there
        assert ("usual" in dict(outcome.left_out)) != there
        assert outcome.completed is not None and outcome.completed.wanted["drafters"] == 1


def test_two_rounds_confirm(llm: LLM, folders: tuple[str, str]) -> None:
    outcome, _ = run(llm, folders, 8)
    assert outcome.completed is not None and outcome.completed.spent <= 8
    assert len(outcome.not_tried) == 1 and len(outcome.heats) == 2
    assert outcome.chosen is not None


def test_an_interrupted_round_counts_for_nobody(
    llm: LLM, folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = TuningOutcome.start(OPTIONS, llm)
    seen: list[str] = []

    def interrupt(what: str) -> None:
        seen.append(what)
        if sum(entry.startswith("confirming") for entry in seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune(llm, variants("ngram"), prompts(), outcome, interrupt)
    assert outcome.results and all(not r.ratios and not r.run.rate for r in outcome.results)
    assert outcome.chosen is None
    assert outcome.completed is not None and not outcome.heats


def test_samples_shrink_for_everybody_alike() -> None:
    costs = target(1000)
    step = costs(1, 13)
    free = fitting_sample(SAMPLE, costs, Budget(None), 5)
    assert free == SAMPLE
    samples = [
        fitting_sample(SAMPLE, costs, Budget(seconds * step, Clock()), 5)
        for seconds in (1e9, 4000, 1)
    ]
    sizes = [(len(one.alone), len(one.together)) for one in samples]
    assert sizes[0] == (4, 16) and sizes[-1] == (1, 0)
    assert sizes == sorted(sizes, reverse=True)


def test_rounds_shrink_until_two_of_them_fit() -> None:
    costs = target(1000)
    one = 48 * costs(1, 1) * 1.15
    six = [Finalist("a", "a", length, 8) for length in range(6)]
    for seconds, expected in (
        (None, (6, 8)),
        (1e12, (6, 8)),
        (1e-9, (3, 1)),
        (2 * 6 * 2 * one + 1e-6, (6, 2)),
    ):
        finalists, size = affordable(six, costs, TuneOptions(), Budget(seconds, Clock()))
        assert (len(finalists), size) == expected

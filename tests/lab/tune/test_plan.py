"""The whole of tuning, on a tiny random pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, ConfigError, DataError, PacelineError, SamplingParams
from paceline.core.costs import CostCurve, TargetCosts
from paceline.lab.bench.prompts import BenchPrompt
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.candidates import DrafterCandidate, at_hand, variants
from paceline.lab.tune.plan import TuningOutcome, rounds_of, tune
from paceline.lab.tune.present import tuned_settings
from paceline.settings.tuned import TunedSettings
from support.engine_models import write_pair

GREEDY = SamplingParams(max_tokens=16)


def test_rounds_share_no_prompt_while_there_are_enough() -> None:
    prompts = [[n] for n in range(20)]
    jobs, turns = rounds_of(prompts, 2, 8, 1, GREEDY)
    assert ([len(job.requests) for job in jobs], turns) == ([8, 8], 1)
    assert len({request.prompt for job in jobs for request in job.requests}) == 16
    for many, count, concurrency, sizes, turns in (
        (20, 3, 1, [8, 8], 2),
        (3, 2, 1, [3], 2),
        (3, 1, 5, [5], 1),
    ):
        jobs, repeats = rounds_of(prompts[:many], count, 8, concurrency, GREEDY)
        assert ([len(job.requests) for job in jobs], repeats) == (sizes, turns)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return write_pair(Path(tmp_path_factory.mktemp("tune")), noise=0.02)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.lab.tune.plan.MIN_BATCH_SIZE", 2)


def words(count: int) -> list[BenchPrompt]:
    texts = ["Once upon a time", "def add(a, b):", "What is 12 + 30?", "A small model"]
    return [BenchPrompt(f"p{n}", f"c{n % 2}", texts[n % 4] + "!" * n, False) for n in range(count)]


def test_tuning_a_random_pair(
    folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheap = CostCurve((1, 2), (1e-6, 1e-6))  # a draft as large as the target would not be asked
    monkeypatch.setattr("paceline.build.measure", lambda *_, **__: cheap)
    # Measured beside other programs rows may look so dear that nothing is drafted.
    rows_are_cheap = TargetCosts((1, 2), (CostCurve((1, 25), (1e-3, 1.24e-3)),) * 2)
    monkeypatch.setattr("paceline.lab.tune.plan.measure_costs", lambda *_: rows_are_cheap)
    llm = LLM(folders[0], draft="none", dtype="float32", max_batch_size=1)
    candidates = [
        *at_hand("other", [f"model:{folders[1]},nodes=0"], only=True),
        DrafterCandidate("gone", "model:nowhere/at/all", "model"),
    ]
    outcome = TuningOutcome(TuneOptions(concurrency=2, max_tokens=12, rounds=1), "m")
    said: list[str] = []
    tune(llm, candidates, words(4), outcome, said.append)
    assert outcome.chosen is not None
    assert [what for what, _ in outcome.left_out] == ["gone"]
    (trial,) = outcome.trials
    assert trial.candidate.family == "model"
    assert trial.run.counts.rates[0] > 0.3  # the draft is the target with a little noise
    assert len(outcome.results) == 2
    assert all(result.ratios for result in outcome.results)
    assert said[:2] == ["loading drafters", "measuring the target"]
    settings = tuned_settings(outcome, llm)
    settings.write(tmp_path / "p.toml")
    assert TunedSettings.read(tmp_path / "p.toml").draft == settings.draft
    again = LLM(folders[0], draft="none", dtype="float32", config=tmp_path / "p.toml")
    assert again.setup_notes == ()
    assert again.generate("Once upon a time", GREEDY)[0].token_ids == (
        llm.generate("Once upon a time", GREEDY)[0].token_ids
    )


def test_rounds_beyond_those_wanted_are_complete(
    folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rounds of different prompts, twice: "4 of 3 rounds. More --seconds measure the rest"."""
    monkeypatch.setattr("paceline.lab.tune.candidates.ROUND_SIZES", (2, 1))
    llm = LLM(folders[0], draft="none", dtype="float32", max_batch_size=1)
    outcome = TuningOutcome(TuneOptions(max_tokens=4, rounds=3), "m")
    tune(llm, variants("ngram"), words(4), outcome, lambda what: None)
    assert outcome.completed is not None and len(outcome.job_results) == 4
    assert "4 of 4 rounds of 2 prompts." in outcome.completed.line
    assert "More --seconds" not in outcome.completed.line


def test_invalid_tuning_options_are_refused(folders: tuple[str, str]) -> None:
    llm = LLM(folders[0], draft="none", dtype="float32", max_batch_size=1)
    with pytest.raises(DataError, match=r"room for 500 new tokens .*, 160 tokens"):
        tune(
            llm,
            [],
            words(2),
            TuningOutcome(TuneOptions(max_tokens=500), "m"),
            lambda what: None,
        )
    given = variants("nowhere/at/all", requested=True)
    with pytest.raises(PacelineError, match="nowhere/at/all"):
        tune(
            llm,
            given,
            words(2),
            TuningOutcome(TuneOptions(max_tokens=4), "m"),
            lambda what: None,
        )
    with pytest.raises(ConfigError, match="has no option colour"):
        options = DrafterCandidate("n", "ngram:colour=1", "ngram", requested=True)
        asked = TuneOptions(max_tokens=4)
        tune(llm, [options], words(2), TuningOutcome(asked, "m"), lambda what: None)

"""Who is a finalist, who wins, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.lab.bench.runner import BenchJob, JobResult
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.candidates import PLAIN_CANDIDATE as PLAIN
from paceline.lab.tune.candidates import (
    Confirmation,
    DrafterCandidate,
    DrafterTrial,
    choose,
    round_size,
    winner,
)
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.present import decision, report_of, tuning_record
from support.made_outcomes import outcome as timed
from support.simulated_clock import Clock


def candidate(label: str, family: str = "", default: bool = False) -> DrafterCandidate:
    return DrafterCandidate(label, label, family or label, default=default)


def trial(label: str, speedup: float, family: str = "") -> DrafterTrial:
    counts = {"drafted": 40, "levels": 40, "reached_at": [10], "accepted_at": [9]}
    return DrafterTrial(candidate(label, family), timed(1 / speedup, **counts), timed(1.0))


TRIALS = [
    trial("a", 1.5),
    trial("a tree", 1.4, family="a"),
    trial("look", 1.3),
    trial("bad", 0.6),
]


def synthetic() -> TuningOutcome:
    return TuningOutcome(TuneOptions(4, rounds=1), "m", trials=[*TRIALS])


def entry(finalist: DrafterCandidate, ratios: Sequence[float], drafted: int = 9) -> Confirmation:
    return Confirmation(finalist, timed(1.0, drafted=drafted), tuple(ratios))


def confirm_by_hand(outcome: TuningOutcome, ratios: Sequence[float]) -> None:
    """A round in which the finalists had these speeds relative to plain decoding."""
    runs = {
        finalist.spec: timed(1 / ratio, drafted=9)
        for finalist, ratio in zip(outcome.finalists, ratios, strict=True)
    }
    outcome.job_results.append(JobResult(BenchJob("", 1, 0.0, 0, ()), 0, runs))


def test_another_draft_must_beat_the_default_clearly() -> None:
    """Two rounds of noise, and settings recommended less than what commands take unasked."""
    usual, other = candidate("usual", default=True), candidate("other")
    for ratio, wins in ((1.22, "usual"), (1.3, "other")):
        results = [entry(PLAIN, [1.0], 0), entry(other, [ratio]), entry(usual, [1.2])]
        assert winner(results).finalist.label == wins


def test_the_winner() -> None:
    plain, fast = entry(PLAIN, [1.0], 0), entry(candidate("a"), [1.5, 1.52, 9.0])
    assert winner([plain, entry(candidate("b"), [1.49]), fast]) is fast
    assert winner([plain, entry(candidate("a"), [1.01])]) is plain
    assert winner([plain, entry(candidate("a"), [1.5], drafted=0)]) is plain
    assert winner([plain]) is plain


def test_a_draft_that_is_faster_in_half_of_the_rounds_is_not_chosen() -> None:
    """Two rounds, 0.05x and 4x, chose a draft; the mean of both was 2x."""
    plain, wild = entry(PLAIN, [1.0, 1.0], 0), entry(candidate("a"), [0.05, 4.0])
    usual = entry(candidate("usual", default=True), [1.2, 1.3])
    assert winner([plain, wild]) is plain
    assert winner([plain, wild, usual]) is usual
    assert winner([plain, entry(candidate("a"), [1.1, 4.0]), usual]) is usual  # once slower
    steady = entry(candidate("a"), [1.5, 1.6])
    assert winner([plain, steady, usual]) is steady


def test_one_slow_round_does_not_choose_plain_decoding_over_the_default() -> None:
    plain, usual = entry(PLAIN, [1.0, 1.0], 0), entry(candidate("usual", default=True), [0.95, 1.8])
    assert winner([plain, usual]) is usual
    slow = entry(candidate("usual", default=True), [0.95, 1.05])
    assert winner([plain, slow]) is plain


def test_one_slow_round_changes_no_choice() -> None:
    """The table had 2 tokens a second against 10, and the choice 1.97x: one was of all rounds
    together, the other their median."""
    outcome = synthetic()
    outcome.finalists = [PLAIN, candidate("look")]
    for ratios in ((1.0, 1.05), (0.5, 2.0)):
        confirm_by_hand(outcome, ratios)
    plain, drafting = outcome.results
    assert (plain.rate, drafting.rate) == (3.0, 6.1)  # of 4 and 2, of 4.2 and 8 tokens a second
    assert drafting.speedup == pytest.approx((1.05 + 4.0) / 2)
    assert "look: 6 tokens/s against 3, 2.5" in decision(outcome)


def test_finalists_are_the_best_of_two_families() -> None:
    assert [one.spec for one in choose(TRIALS)] == ["none", "a", "look"]
    assert choose([]) == [PLAIN]


def test_a_fast_run_without_accepted_drafts_is_no_gain() -> None:
    """On a busy machine a drafter of 1.00 tokens a step came first, by 1.31x."""
    lucky = trial("lucky", 1.31)
    (answer,) = lucky.run.answers
    run = replace(lucky.run, answers=[replace(answer, tokens=(0, 1))])  # in two steps
    chosen = choose([replace(lucky, run=run), trial("look", 1.08)])
    assert [one.label for one in chosen] == ["plain", "look", "lucky"]


def test_the_default_draft_is_confirmed() -> None:
    usual = DrafterCandidate("usual", "hybrid:ngram+suffix", "hybrid", default=True)
    chosen = choose(TRIALS, usual)
    assert [one.label for one in chosen] == ["plain", "usual", "a", "look"]
    same = replace(usual, spec="a")  # that is also the best of the trials
    assert [one for one in choose(TRIALS, same) if one.spec == "a"] == [same]
    outcome = synthetic()
    outcome.finalists = chosen
    confirm_by_hand(outcome, [1.0, *[1.2] * (len(chosen) - 1)])
    rows = tuning_record(outcome)["confirmation"]
    assert [row["spec"] for row in rows[:2]] == ["none", usual.spec]
    assert report_of(outcome).sections


def test_rounds_shrink_until_two_of_them_fit() -> None:
    for seconds, expected in ((None, 8), (1e12, 8), (1e-9, 1), (2 * 6 * 2 * 0.5 + 1e-6, 2)):
        assert round_size(6, 0.5, TuneOptions(), Budget(seconds, Clock())) == expected


def test_confirmations_take_precedence_over_trials() -> None:
    """It confirmed 0.70x and 0.92x, and then named a draft "predicted to reach 1.43x"."""
    outcome = synthetic()
    outcome.finalists = [PLAIN, candidate("look"), candidate("a")]
    confirm_by_hand(outcome, (1.0, 0.7, 0.92))
    shown = "a 0.92x, look 0.70x"
    outcome.options = replace(outcome.options, rounds=3)
    assert decision(outcome) == (
        f"Not confirmed: speedups over plain decoding {shown}. Give more --seconds."
    )
    outcome.options = replace(outcome.options, rounds=1)
    assert decision(outcome) == f"Plain decoding: all drafts were slower ({shown})."
    outcome.options, outcome.job_results = replace(outcome.options, rounds=3), list[JobResult]()
    confirm_by_hand(outcome, (1.0, 1.3, 0.92))
    assert "over plain decoding look 1.30x, a 0.92x" in decision(outcome)


def test_an_interrupted_outcome_reports_its_measurements() -> None:
    outcome = synthetic()
    outcome.finalists.append(PLAIN)
    assert decision(outcome).startswith(
        "Not confirmed: speedups over plain decoding a 1.50x in its"
    )
    record = tuning_record(outcome)
    assert record["confirmed"] is False
    assert [row["spec"] for row in record["search"][:2]] == ["a", "a tree"]
    titles = [section.title for section in report_of(outcome).sections]
    assert titles == ["Search", "Choice"]
    empty = TuningOutcome(TuneOptions(), "m")
    assert decision(empty) == "Not confirmed: nothing was measured. Give more --seconds."
    assert tuning_record(empty)["search"] == []
    assert [section.title for section in report_of(empty).sections] == ["Choice"]

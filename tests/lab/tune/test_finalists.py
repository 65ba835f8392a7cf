"""Who is a finalist, who wins, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.engine.driver import StepTotals
from paceline.lab.bench.runner import BenchJob, JobResult
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.candidates import (
    Confirmation,
    DrafterCandidate,
    DrafterTrial,
    Finalist,
    affordable,
    choose,
    winner,
)
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.present import decision, report_of, tuning_record
from paceline.settings.tuned import PassCosts
from support.made_outcomes import outcome as timed
from support.simulated_clock import Clock

PLAIN = Finalist("plain", "none", 0)


def trial(
    label: str, speedup: float, passes: bool = True, levels: int = 4, family: str = ""
) -> DrafterTrial:
    """A trial in which every draft had this depth."""
    counts = {"drafted": 10 * levels, "levels": 10 * levels, "reached_at": [10], "accepted_at": [9]}
    costs = {label: PassCosts((1,), (0.1,))} if passes else {}
    one = DrafterCandidate(label, label, family or label)
    return DrafterTrial(one, timed(1 / speedup, **counts), timed(1.0), costs)


TRIALS = [
    trial("a", 1.5, levels=6),
    trial("a tree", 1.4, family="a"),
    trial("look", 1.3, passes=False),
    trial("bad", 0.6),
]


def synthetic() -> TuningOutcome:
    return TuningOutcome(TuneOptions(4, rounds=1), "m", trials=[*TRIALS])


def entry(finalist: Finalist, ratios: Sequence[float], drafted: int = 9) -> Confirmation:
    return Confirmation(finalist, timed(1.0, drafted=drafted), tuple(ratios))


def of_spec(spec: str, length: int | str) -> Finalist:
    return Finalist(spec, spec, length)  # type: ignore[arg-type]


def confirm_by_hand(outcome: TuningOutcome, ratios: Sequence[float]) -> None:
    """A round in which the finalists had these speeds relative to plain decoding."""
    runs = {
        finalist.key: timed(1 / ratio, drafted=9)
        for finalist, ratio in zip(outcome.finalists, ratios, strict=True)
    }
    outcome.job_results.append(JobResult(BenchJob("", 1, 0.0, 0, ()), 0, runs))


def test_another_draft_must_beat_the_default_clearly() -> None:
    """Two rounds of noise, and settings recommended less than what commands take unasked."""
    usual = Finalist("usual", "hybrid:ngram+suffix", "auto", default=True)
    other = Finalist("other", "suffix", 4)
    for ratio, wins in ((1.22, "usual"), (1.3, "other")):
        results = [
            entry(PLAIN, [1.0], 0),
            entry(other, [ratio]),
            entry(usual, [1.2]),
        ]
        assert winner(results).finalist.label == wins


def test_the_winner() -> None:
    plain = entry(PLAIN, [1.0], 0)
    fast = entry(of_spec("a", 4), [1.5, 1.52, 9.0])
    adaptive = entry(of_spec("a", "auto"), [1.49])
    assert winner([plain, fast, adaptive]) is adaptive
    assert winner([plain, fast, entry(of_spec("a", "auto"), [1.4])]) is fast
    assert winner([plain, fast, entry(of_spec("b", "auto"), [1.5])]) is fast
    assert winner([plain, entry(of_spec("a", 4), [1.01])]) is plain
    assert winner([plain, entry(of_spec("a", "auto"), [1.5], drafted=0)]) is plain
    assert winner([plain]) is plain


def test_a_draft_that_is_faster_in_half_of_the_rounds_is_not_chosen() -> None:
    """Two rounds, 0.05x and 4x, chose a draft; the mean of both was 2x."""
    plain, default = entry(PLAIN, [1.0, 1.0], 0), of_spec("usual", "auto")
    wild = entry(of_spec("a", 4), [0.05, 4.0])
    usual = entry(replace(default, default=True), [1.2, 1.3])
    assert winner([plain, wild]) is plain
    assert winner([plain, wild, usual]) is usual
    assert winner([plain, entry(of_spec("a", 4), [1.1, 4.0]), usual]) is usual  # once slower
    steady = entry(of_spec("a", 4), [1.5, 1.6])
    assert winner([plain, steady, usual]) is steady


def test_one_slow_round_changes_no_choice() -> None:
    """The table had 2 tokens a second against 10, and the choice 1.97x: one was of all rounds
    together, the other their median."""
    outcome = synthetic()
    outcome.finalists = [PLAIN, of_spec("look", 8)]
    for ratios in ((1.0, 1.05), (0.5, 2.0)):
        confirm_by_hand(outcome, ratios)
    plain, drafting = outcome.results
    assert (plain.rate, drafting.rate) == (3.0, 6.1)  # of 4 and 2, of 4.2 and 8 tokens a second
    assert drafting.speedup == pytest.approx((1.05 + 4.0) / 2)
    assert "look, length 8: 6 tokens/s against 3, 2.5" in decision(outcome)


def test_a_busy_machine_is_reported() -> None:
    quick, slow = (StepTotals(2, 2, 2, seconds={"target": seconds}) for seconds in (1.0, 4.0))
    outcome = synthetic()
    assert outcome.timing_spread == 1.0  # no step was timed
    outcome.trials = [
        replace(one, plain=timed(1.0, decoding=steps))
        for one, steps in zip(TRIALS, (quick, slow), strict=False)
    ]
    assert outcome.timing_spread == 4.0
    assert "took up to 4.0 times" in report_of(outcome).sections[0].blocks[0].text  # type: ignore[union-attr]


def test_finalists_are_the_best_of_two_families_and_a_hybrid() -> None:
    chosen = choose(TRIALS)
    assert chosen[0] == PLAIN
    assert [(one.spec, one.length) for one in chosen[1:]] == [
        ("look", 4),
        ("look", "auto"),
        ("a", 6),
        ("a", "auto"),
        ("hybrid:look+a", "auto"),
    ]
    assert chosen[-1].trials == (TRIALS[2], TRIALS[0])


def test_a_fast_run_without_accepted_drafts_is_no_gain() -> None:
    """On a busy machine a drafter of 1.00 tokens a step came first, by 1.31x."""
    lucky = trial("lucky", 1.31)
    (answer,) = lucky.run.answers
    run = replace(lucky.run, answers=[replace(answer, tokens=(0, 1))])  # in two steps
    chosen = choose([replace(lucky, run=run), trial("look", 1.08, passes=False)])
    assert [one.label for one in chosen] == ["plain", "look", "look", "lucky", "lucky"]


def test_gaining_lookup_drafters_are_confirmed_before_model_drafters() -> None:
    losing = [TRIALS[0], trial("look", 0.9, passes=False)]
    assert [one.label for one in choose(losing)] == ["plain", "a", "a", "look", "look"]
    assert [one.label for one in choose([])] == ["plain"]


def test_the_default_draft_is_confirmed_even_with_little_time() -> None:
    usual = DrafterCandidate("usual", "hybrid:ngram+suffix", "hybrid", default=True)
    chosen = choose(TRIALS, usual)
    assert [one.label for one in chosen[:3]] == ["plain", "usual", "look"]
    assert (chosen[1].length, chosen[1].trials) == ("auto", ())  # nothing of "ngram" was tried
    few, _ = affordable(chosen, 1.0, TuneOptions(), Budget(0.0))
    assert [one.label for one in few] == ["plain", "usual", "look", "look"]
    outcome = synthetic()
    outcome.finalists = chosen
    confirm_by_hand(outcome, [1.0, *[1.2] * (len(chosen) - 1)])
    assert [row["spec"] for row in tuning_record(outcome)["confirmation"][:2]] == [
        "none",
        usual.spec,
    ]
    assert report_of(outcome).sections


def test_rounds_shrink_until_two_of_them_fit() -> None:
    six = [of_spec("a", length) for length in range(6)]
    for seconds, expected in (
        (None, (6, 8)),
        (1e12, (6, 8)),
        (1e-9, (3, 1)),
        (2 * 6 * 2 * 0.5 + 1e-6, (6, 2)),
    ):
        finalists, size = affordable(six, 0.5, TuneOptions(), Budget(seconds, Clock()))
        assert (len(finalists), size) == expected


def test_confirmations_take_precedence_over_trials() -> None:
    """It confirmed 0.70x and 0.92x, and then named a draft "predicted to reach 1.43x"."""
    outcome = synthetic()
    outcome.finalists = [PLAIN, of_spec("look", "auto"), of_spec("a", 6)]
    confirm_by_hand(outcome, (1.0, 0.7, 0.92))
    shown = "a, length 6 0.92x, look, length auto 0.70x"
    outcome.options = replace(outcome.options, rounds=3)
    assert decision(outcome) == (
        f"Not confirmed: speedups over plain decoding {shown}. Give more --seconds."
    )
    outcome.options = replace(outcome.options, rounds=1)
    assert decision(outcome) == f"Plain decoding: all drafts were slower ({shown})."
    outcome.options, outcome.job_results = replace(outcome.options, rounds=3), list[JobResult]()
    confirm_by_hand(outcome, (1.0, 1.3, 0.92))
    assert "over plain decoding look, length auto 1.30x, a, length" in decision(outcome)


def test_an_interrupted_outcome_reports_its_measurements() -> None:
    outcome = synthetic()
    outcome.finalists.append(PLAIN)
    assert decision(outcome).startswith(
        "Not confirmed: speedups over plain decoding a 1.50x in its"
    )
    record = tuning_record(outcome)
    assert record["confirmed"] is False
    assert [(row["spec"], row["draft_length"]) for row in record["search"][:2]] == [
        ("a", 6),
        ("a tree", 4),
    ]
    titles = [section.title for section in report_of(outcome).sections]
    assert titles == ["Search", "Choice"]
    empty = TuningOutcome(TuneOptions(), "m")
    assert decision(empty) == "Not confirmed: nothing was measured. Give more --seconds."
    assert tuning_record(empty)["search"] == []
    assert [section.title for section in report_of(empty).sections] == ["Choice"]

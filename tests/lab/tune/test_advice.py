"""The rules of the field, agreed with or contradicted by made-up measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from paceline.core.costs import TargetCosts
from paceline.lab.bench.runner import BenchJob, Heat
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.measure import Finalist
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.present import Advice, advise
from paceline.lab.tune.search import MeasuredMethod
from support.made_outcomes import outcome as timed
from support.tuning_methods import NOTHING, PLAIN, chain, target


def outcome(
    *methods: MeasuredMethod, costs: TargetCosts | None = None, copied: float = 0.0
) -> TuningOutcome:
    return TuningOutcome(
        TuneOptions(),
        "m",
        parameters=1000,
        target=costs or target(1000),
        plain=PLAIN,
        methods=list(methods),
        copied=copied,
    )


def rule(advices: Iterable[Advice], words: str) -> Advice:
    (item,) = [advice for advice in advices if words in advice.rule]
    return item


def lookup(rate: float, levels: int = 4) -> MeasuredMethod:
    """Text that is looked up: no passes."""
    base = chain(rate, 0.0, levels, "ngram")
    return replace(base, costs=replace(base.costs, passes=(0,) * (levels + 1), seconds=NOTHING))


@pytest.mark.parametrize(
    ("parameters", "cost", "holds", "words"),
    [
        (70, 0.1, True, "14.3 times smaller; a pass costs 0.10 of a target step"),
        (500, 0.1, False, "2.0 times smaller"),
        (70, 3.0, False, "a pass costs 3.00"),
        (500, 3.0, True, "2.0 times smaller"),
    ],
)
def test_the_size_of_a_draft(parameters: int, cost: float, holds: bool, words: str) -> None:
    advices = advise(outcome(replace(chain(0.8, cost), parameters=parameters)))
    item = rule(advices, "10 to 20 times")
    assert item.holds is holds
    assert words in item.measured


def test_a_confirmed_figure_counts_more_than_a_prediction() -> None:
    method = replace(chain(0.8, 0.1), parameters=70)
    tuned = outcome(method)
    assert rule(advise(tuned), "10 to 20 times").holds is True
    tuned.finalists = [Finalist("p", "none", 0, 8), Finalist("d", "d", "auto", 8, 1.43, (method,))]
    runs = {"plain": timed(0.92), "d, length auto": timed(1.0, drafted=9)}
    tuned.heats.heats.append(Heat(BenchJob("", 1, 0.0, 0, ()), 0, runs))
    item = rule(advise(tuned), "10 to 20 times")
    assert (item.holds, item.measured[:12]) == (False, "draft 0.92x:")


def test_low_acceptance() -> None:
    item = rule(advise(outcome(chain(0.3, 0.5))), "below 0.4")
    assert item.holds is True
    assert item.measured.startswith("less have draft 0.")
    item = rule(advise(outcome(chain(0.3, 0.01))), "below 0.4")
    assert item.holds is False
    item = rule(advise(outcome(chain(0.7, 0.01))), "below 0.4")
    assert item.holds is None
    assert "the least is 0.70, draft" in item.measured


def test_high_acceptance() -> None:
    assert rule(advise(outcome(chain(0.95, 0.05))), "above 0.8").holds is True
    item = rule(advise(outcome(chain(0.9, 1.5))), "above 0.8")
    assert item.holds is False
    assert "best length is 1 of 8" in item.measured
    assert rule(advise(outcome(chain(0.5, 0.3))), "above 0.8").holds is True


def test_prompt_lookup_where_output_copies() -> None:
    item = rule(advise(outcome(lookup(0.9), chain(0.5, 0.2), copied=0.6)), "copies")
    assert item.holds is True
    assert item.measured.startswith("60% of the output")
    item = rule(advise(outcome(lookup(0.2), chain(0.9, 0.05), copied=0.6)), "copies")
    assert item.holds is False
    item = rule(advise(outcome(lookup(0.2), chain(0.9, 0.05), copied=0.1)), "copies")
    assert item.holds is True
    item = rule(advise(outcome(lookup(0.6), copied=0.6)), "copies")
    assert item.holds is True
    item = rule(advise(outcome(lookup(0.001), copied=0.0)), "copies")
    assert item.holds is True


def test_nothing_is_said_of_nothing() -> None:
    assert not list(advise(TuningOutcome(TuneOptions(), "m", 1000)))

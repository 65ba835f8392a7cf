"""Which draft lengths are best for a batch, from gains and prices alone."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from paceline.core.costs import CostCurve, StepCosts
from paceline.pace.prices import HURT, DraftProspect, Prices, choose
from paceline.pace.steptime import StepTime
from paceline.pace.worth import Profile, expected_tokens


def prices(slope: float, draft: float) -> Prices:
    """A step costs 1 and ``slope`` for each further row; a level ``draft`` and a little a row."""
    one = CostCurve((1, 101), (1.0, 1.0 + 100 * slope))
    full = CostCurve((1, 101), (1.0 + 7 * slope, 1.0 + (8 * 101 - 1) * slope))
    lengths = tuple(range(5))
    profile = Profile(lengths, lengths, CostCurve((1, 8), (draft, 1.7 * draft)))
    return Prices(StepTime(StepCosts(one, full, 8)), {"model": profile})


def candidate(rate: float, reading: float = 0.0) -> DraftProspect:
    return DraftProspect("model", expected_tokens([rate] * 4), reading)


def mean_time(known: Prices, everyone: list[DraftProspect], lengths: tuple[int, ...]) -> float:
    """Seconds of a token, the mean over the sequences; infinite if any is slowed down."""
    names = [own.name for own in everyone]
    seconds = known.seconds(len(everyone), names, lengths)
    gains = [own.gains[n] for own, n in zip(everyone, lengths, strict=True)]
    if any(lengths) and seconds > (1 + HURT) * known.steps.rest(len(everyone), 0) * min(gains):
        return math.inf
    return seconds * sum(1 / gain for gain in gains) / len(gains)


def test_no_other_lengths_are_much_better() -> None:
    """Against all of 5^4 ways, for sequences of any acceptance."""
    dice = random.Random(3)
    worse = []
    for _ in range(24):
        known = prices(dice.uniform(0.0, 0.3), dice.uniform(0.02, 0.3))
        everyone = [candidate(dice.uniform(0.0, 0.98)) for _ in range(4)]
        chosen = choose(known, 4, everyone)
        best = min(
            mean_time(known, everyone, lengths) for lengths in itertools.product(range(5), repeat=4)
        )
        worse.append(mean_time(known, everyone, tuple(chosen)) / best)
    assert max(worse) < 1.15 and statistics.mean(worse) < 1.03


def test_alone_the_ratio_decides() -> None:
    known = prices(slope=0.05, draft=0.1)
    (chosen,) = choose(known, 1, [candidate(0.8)])
    gains, table = candidate(0.8).gains, known.table("model", 1)
    assert gains[chosen] / table[chosen] == max(g / t for g, t in zip(gains, table, strict=True))


def test_no_request_pays_for_anothers_speed() -> None:
    """Drafting for one would be faster in sum, but slow down seven that gain nothing."""
    known = prices(slope=0.0, draft=0.12)
    everyone = [candidate(0.98), *(candidate(0.0) for _ in range(7))]
    assert choose(known, 8, everyone) == [0] * 8
    assert choose(known, 8, [candidate(0.98)] * 8) == [4] * 8


def test_reading_is_written_off() -> None:
    known = prices(slope=0.05, draft=0.1)
    assert choose(known, 1, [candidate(0.8)])[0] > 0
    assert choose(known, 1, [candidate(0.8, reading=1.0)]) == [0]


def test_reading_is_learnt() -> None:
    known = prices(slope=0.05, draft=0.1)
    for _ in range(10):
        known.learn_reading("model", 0.5 * 1000, 1000)
    known.learn_reading("model", 1e9, 10)  # a hiccup
    assert known.reading("model") == pytest.approx(0.5, rel=0.2)

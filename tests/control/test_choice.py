"""Which draft lengths are best for a batch, from gains and prices alone."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import pytest

from paceline.control.acceptance import expected_tokens
from paceline.control.choice import MAX_SLOWDOWN, choose
from paceline.control.cost import CostModel, DraftOption
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts


def prices(slope: float, draft: float) -> CostModel:
    """A step costs 1 and ``slope`` for each further row; a level ``draft`` and a little a row."""
    one = CostCurve((1, 101), (1.0, 1.0 + 100 * slope))
    full = CostCurve((1, 101), (1.0 + 7 * slope, 1.0 + (8 * 101 - 1) * slope))
    lengths = tuple(range(5))
    profile = DrafterCosts(lengths, lengths, CostCurve((1, 8), (draft, 1.7 * draft)))
    return CostModel(TargetCosts((1, 8), (one, full)), {"model": profile})


def lengths(known: CostModel, rates: list[float], reading: float = 0.0) -> list[int]:
    return [draft.length for draft in choose(known, len(rates), options(known, rates, reading))]


def options(known: CostModel, rates: list[float], reading: float = 0.0) -> list[list[DraftOption]]:
    """Of sequences with such acceptance, that must first read for so long, with one token to go."""
    gains = [expected_tokens([rate] * 4) for rate in rates]
    none, *table = known.prices("model", len(rates))
    return [
        [DraftOption(None, 0, 0.0, 1.0, none)]
        + [
            DraftOption("model", n, n, own[n], part + reading * own[n], reading * own[n], reading)
            for n, part in enumerate(table, 1)
        ]
        for own in gains
    ]


def mean_time(known: CostModel, drafts: Sequence[DraftOption]) -> float:
    """Seconds of a token, the mean over the sequences; infinite if any is slowed down."""
    seconds = known.step(len(drafts), drafts)
    gains = [draft.tokens for draft in drafts]
    drafting = any(draft.length for draft in drafts)
    if drafting and seconds > (1 + MAX_SLOWDOWN) * known.verification(len(drafts)) * min(gains):
        return math.inf
    return seconds * sum(1 / gain for gain in gains) / len(gains)


def test_no_other_lengths_are_much_better() -> None:
    """Against all of 5^4 ways, for sequences of any acceptance."""
    dice = random.Random(3)
    worse = []
    for _ in range(24):
        known = prices(dice.uniform(0.0, 0.3), dice.uniform(0.02, 0.3))
        everyone = options(known, [dice.uniform(0.0, 0.98) for _ in range(4)])
        best = min(mean_time(known, drafts) for drafts in itertools.product(*everyone))
        worse.append(mean_time(known, choose(known, 4, everyone)) / best)
    assert max(worse) < 1.15 and statistics.mean(worse) < 1.03


def test_longer_drafts_are_found_beside_another_drafter() -> None:
    """From no drafts the search ended at one level: a step of 25.3 for 3 tokens is better than one
    of 18 for 2, but not while the others draft one."""
    target = TargetCosts((8,), (CostCurve((1, 2, 3), (16.0, 18.1, 25.3)),))
    lookup, dear = (DrafterCosts((0, 1, 2), (0, n, 2 * n), CostCurve((1,), (9.0,))) for n in (0, 1))
    known = CostModel(target, {"lookup": lookup, "dear": dear})
    ways = [
        DraftOption(None, 0, 0.0, 1.0, 2.0),
        DraftOption("lookup", 1, 1, 2.0, 18.1 / 8),
        DraftOption("lookup", 2, 2, 3.0, 25.3 / 8),
        DraftOption("dear", 1, 1, 1.95, 27.1 / 8),
    ]
    assert [(d.name, d.length) for d in choose(known, 8, [ways] * 8)] == [("lookup", 2)] * 8


def test_alone_the_ratio_decides() -> None:
    known = prices(slope=0.05, draft=0.1)
    (own,) = options(known, [0.8])
    (chosen,) = choose(known, 1, [own])
    assert chosen.tokens / known.step(1, [chosen]) == pytest.approx(
        max(draft.tokens / known.step(1, [draft]) for draft in own)
    )


def test_no_request_pays_for_anothers_speed() -> None:
    """Drafting for one would be faster in sum, but slow down seven that gain nothing."""
    known = prices(slope=0.0, draft=0.12)
    assert lengths(known, [0.98, *[0.0] * 7]) == [0] * 8
    assert lengths(known, [0.98] * 8) == [4] * 8


def test_reading_is_written_off() -> None:
    known = prices(slope=0.05, draft=0.1)
    assert lengths(known, [0.8])[0] > 0
    assert lengths(known, [0.8], reading=1.0) == [0]


def test_reading_is_learnt() -> None:
    known = prices(slope=0.05, draft=0.1)
    for _ in range(10):
        known.learn_reading("model", 0.5 * 1000, 1000)
    known.learn_reading("model", 1e9, 10)  # a hiccup
    assert known.reading_token("model") == pytest.approx(0.5, rel=0.2)

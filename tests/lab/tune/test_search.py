"""The cost model and the search, on made-up methods whose best settings can be worked out."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest

from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.search import MeasuredMethod, batch_sizes
from support.tuning_methods import NOTHING, PLAIN, chain, levels_of, step, target


@pytest.mark.parametrize(("rate", "cost"), [(0.8, 0.1), (0.6, 0.05), (0.9, 0.3), (0.3, 0.02)])
def test_free_verification_gives_the_formula_of_leviathan(rate: float, cost: float) -> None:
    method, costs = chain(rate, cost), target(10_000)
    for g in range(9):
        setting = method.predict(costs, g, 1)
        assert setting.tokens_per_step == pytest.approx((1 - rate ** (g + 1)) / (1 - rate))
        formula = (1 - rate ** (g + 1)) / ((1 - rate) * (g * cost + 1))
        assert setting.rate == pytest.approx(formula)


def random_method(chance: random.Random, number: int) -> MeasuredMethod:
    levels = chance.randint(1, 9)
    survival = tuple(itertools.accumulate((chance.random() for _ in range(levels)), float.__mul__))
    return MeasuredMethod(
        label=f"m{number}",
        spec=f"m{number}",
        family=f"f{number % 3}",
        levels=levels_of(survival),
        costs=DrafterCosts(
            (0.0, *itertools.accumulate(chance.uniform(1, 3) for _ in range(levels))),
            tuple(range(levels + 1)),
            CostCurve((1, 32), (chance.uniform(0.01, 0.3), chance.uniform(0.3, 2.0))),
        ),
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_search_finds_what_trying_everything_finds(seed: int) -> None:
    chance = random.Random(seed)
    methods = [random_method(chance, n) for n in range(6)]
    costs = target(chance.choice([4, 16, 64]))
    for batch in (1, 3, 8, 32):
        rates: dict[tuple[str, int], float] = {}
        for method in methods:
            for g in range(1, len(method.costs.nodes)):
                tokens = 1 + math.fsum(method.survival[:g])
                nodes = round(method.costs.nodes[g], 1)
                seconds = g * method.costs.seconds(batch) + costs(batch, 1 + nodes)
                rates[method.label, g] = batch * tokens / seconds
        (label, length), rate = max(rates.items(), key=lambda item: item[1])
        options = TuneOptions(concurrency=batch)
        settings = TuningOutcome(options, "m", 0, target=costs, methods=methods).settings
        assert (settings[0].method.label, settings[0].length) == (label, length)
        assert settings[0].rate == pytest.approx(rate)
        assert [s.rate for s in settings] == sorted((s.rate for s in settings), reverse=True)
        assert {s.method.label for s in settings} == {m.label for m in methods}


def test_what_real_steps_took_is_learnt() -> None:
    """Passes take twice what was timed, and a step half as much again as its forward."""
    steps = tuple((n, step(0.2 * n, 1.2, 0.3, nodes=n)) for n in (0, 2, 8))
    method = replace(chain(0.8, 0.1), steps=steps)
    costs = target(10_000)
    for length in (2, 8):
        assert method.predict(costs, length, 1).seconds == pytest.approx(
            1.5 + 0.2 * length, rel=0.03
        )
    assert method.predict(costs, 5, 1).drafting == pytest.approx(1.0, rel=0.05)
    assert method.pass_ratio(costs) == pytest.approx(0.2 / 1.5, rel=0.05)


def test_looking_up_takes_time_of_its_own() -> None:
    steps = ((0, step()), (4, step(0.3, nodes=4)))
    costs = DrafterCosts(tuple(range(9)), (0,) * 9, NOTHING)
    method = replace(chain(0.8, 0.0), costs=costs, steps=steps)
    assert method.predict(target(10_000), 4, 1).seconds == pytest.approx(1.3, rel=0.03)


def test_a_lookup_with_trees_has_no_passes() -> None:
    """Its share of a step was shown as -78 %: trees that are seldom full counted as full."""
    costs = DrafterCosts(tuple(range(0, 40, 8)), (0,) * 5, NOTHING)
    assert replace(chain(0.3, 0.0), costs=costs).predict(target(4), 2, 1).drafting == 0


def test_a_better_draft_is_drafted_longer() -> None:
    costs = target(10_000)
    lengths = [chain(rate, 0.1).best_length(costs, 1).length for rate in (0.3, 0.6, 0.8, 0.95)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1] == 8


def test_break_even_is_where_verification_stops_being_free() -> None:
    # With a rate of 1/2 and one level a step yields 1.5 tokens. It takes 0.1 for the draft and
    # max(1, 2 b / 16) for the target, against max(1, b / 16): the two rates meet at b = 11.2.
    method = chain(0.5, 0.1, levels=1)
    costs = target(16, largest=64)
    exact = [b for b in range(1, 33) if 1.5 / (0.1 + max(1, b / 8)) > 1 / max(1, b / 16)]
    assert exact == list(range(1, 12))
    assert method.break_even(target_exact(16), 32) == 11
    assert method.break_even(target_exact(10_000), 32) == 32
    assert chain(0.05, 0.5).break_even(costs, 32) == 0
    first, last = (method.best_length(costs, batch).speedup for batch in (1, 32))
    assert first > 1 > last


def target_exact(free_tokens: int) -> TargetCosts:
    """As ``target``, with every batch size measured."""
    batches, tokens = tuple(range(1, 33)), (1, 2)
    curves = [
        CostCurve(tokens, tuple(max(1.0, b * n / free_tokens) for n in tokens)) for b in batches
    ]
    return TargetCosts(batches, tuple(curves))


def test_costs_between_and_beyond_the_measured_batches() -> None:
    costs = TargetCosts((1, 4), (CostCurve((1, 3), (1.0, 3.0)), CostCurve((1, 3), (4.0, 6.0))))
    assert costs(1, 2) == 2.0
    assert costs(2, 1) == 2.0
    assert costs(8, 1) == 8.0
    assert TargetCosts((2,), (CostCurve((1,), (3.0,)),))(4, 1) == 6.0


def test_batch_sizes() -> None:
    assert batch_sizes(6, 32) == [1, 2, 4, 6, 8, 16, 32]
    assert batch_sizes(48, 32) == [1, 2, 4, 8, 16, 32, 48]
    assert batch_sizes(5, 5) == [1, 2, 4, 5]


def test_mean_acceptance_counts_tries() -> None:
    method = chain(0.5, 0.1, levels=3)
    assert method.levels.acceptance == pytest.approx(0.5)
    assert PLAIN.levels.acceptance == 0.0
    assert PLAIN.costs.costless
    assert not method.costs.costless

"""What start-up measures, how long that takes, and what follows for trees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import LLM, build
from paceline.build import measure_costs
from paceline.core.costs import CostCurve, TargetCosts
from paceline.draft.heads.eagle import EagleDrafter
from paceline.draft.trees.policy import break_even_chance
from paceline.model import measure
from paceline.model.paged.cache import PagedCache
from support.simulated_clock import Clock

_MEASURING = build._MEASURING_SECONDS  # before the suite cuts it short
EAGLE3 = "eagle3:paceline/tiny-eagle3"
# Seconds of forwards of SmolLM2 over 1, 8, 16, 32 and 64 rows, as measured (docs/benchmarks.md).
TILES = CostCurve((1, 8, 16, 32, 64), (0.0140, 0.0155, 0.0166, 0.0211, 0.033))
NO_TILES = CostCurve((1, 8, 16, 32, 64), (0.0140, 0.0266, 0.0448, 0.0812, 0.16))
FLOAT32 = CostCurve((1, 8, 16, 32, 64), (0.039, 0.0456, 0.0608, 0.0909, 0.15))


class Priced:
    """A target that takes simulated seconds by rows."""

    max_positions = 4096
    device = torch.device("cpu")

    offload = None

    def __init__(self, price: CostCurve, clock: Clock) -> None:
        self.price, self.clock = price, clock
        self.rows: list[int] = []

    def __call__(self, batch: object, cache: object) -> object:
        rows = len(batch.input_ids)  # type: ignore[attr-defined]
        self.rows.append(rows)
        self.clock.now += self.price(rows)
        return SimpleNamespace(logits=torch.zeros(1, 1), greedy=None)


def measured(monkeypatch: pytest.MonkeyPatch, price: CostCurve, most: int) -> tuple[Priced, float]:
    """What was run, and in how many simulated seconds."""
    clock = Clock()
    for module in (build, measure):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock))
    whole: Any = measure.measure
    monkeypatch.setattr(measure, "measure", whole.__wrapped__)  # which the suite cuts short
    monkeypatch.setattr(build, "_MEASURING_SECONDS", _MEASURING)
    target = Priced(price, clock)
    cache = PagedCache([(1, 4, 4)], 512, 16, torch.float32, torch.device("cpu"))
    costs = measure_costs(target, cache, most)  # type: ignore[arg-type]
    assert cache.pool.available == 512
    assert costs.batches == tuple(sorted(costs.batches)) and {1, most} <= set(costs.batches)
    for batch, curve in zip(costs.batches, costs.curves, strict=True):
        own = [price(batch * tokens) for tokens in curve.tokens]
        assert curve.seconds == pytest.approx(own)
    assert costs.curves[0].tokens[-1] == 32
    return target, clock.now


@pytest.mark.parametrize("most", [1, 8, 32])
@pytest.mark.parametrize("price", [TILES, NO_TILES, FLOAT32])
def test_prices_up_to_32_rows_in_less_than_two_seconds(
    monkeypatch: pytest.MonkeyPatch, price: CostCurve, most: int
) -> None:
    target, seconds = measured(monkeypatch, price, most)
    assert {1, 2, 3, 5, 8, 16, 32} <= set(target.rows)
    assert seconds + 2 * build._WARM_UP_SECONDS < 2.0


def test_where_there_is_time_numbers_of_sequences_between_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quick = CostCurve((1, 64), (0.001, 0.004))
    target, seconds = measured(monkeypatch, quick, 8)
    assert target.rows.count(4 * 16) > 10 and target.rows.count(2 * 32) > 10
    assert seconds < 1.5


# -- trees ---------------------------------------------------------------------------------------


def test_nodes_pay_from_a_chance_that_their_rows_decide() -> None:
    assert break_even_chance(CostCurve((1, 33), (1.0, 1.0))) == 0
    assert break_even_chance(CostCurve((1, 33), (1.0, 33.0))) == 0.5
    assert (
        0
        < break_even_chance(TILES)
        < break_even_chance(FLOAT32)
        < break_even_chance(NO_TILES)
        < 0.5
    )


def head_of(monkeypatch: pytest.MonkeyPatch, price: CostCurve, **options: object) -> EagleDrafter:
    costs = TargetCosts((1,), (price,))
    monkeypatch.setattr(build, "measure_costs", lambda *args: costs)
    draft = str(options.pop("draft", EAGLE3))
    with_head = LLM("paceline/tiny", draft, dtype="float32", **options)  # type: ignore[arg-type]
    drafter = with_head.engine.drafter
    assert isinstance(drafter, EagleDrafter)
    return drafter


@pytest.mark.parametrize(("price", "chance"), [(1.0, 0.0), (33.0, 0.5)])
def test_a_head_draws_trees_by_measured_prices(
    monkeypatch: pytest.MonkeyPatch, price: float, chance: float
) -> None:
    curve = CostCurve((1, 33), (1.0, price))
    head = head_of(monkeypatch, curve)
    assert (head.max_nodes(8), head._min_node_prob) == (16, chance)
    head = head_of(monkeypatch, curve, draft=f"{EAGLE3},nodes=10")
    assert (head.max_nodes(8), head._min_node_prob) == (10, chance)
    head = head_of(monkeypatch, curve, draft_length=8)
    assert (head.max_nodes(8), head._min_node_prob) == (16, 0.02), "nothing is measured then"


def test_what_is_looked_up_may_be_as_long_as_prices_are_known() -> None:
    llm = LLM("paceline/tiny", "suffix", dtype="float32")
    profile = llm.engine.controller.cost.drafters["suffix"]  # type: ignore[attr-defined]
    assert profile.max_length == 32

"""What steps take: measured at start-up, corrected by steps."""

from __future__ import annotations

import pytest

from paceline.control.cost import CostModel
from paceline.control.options import DrafterCosts
from paceline.core.costs import CostCurve, TargetCosts


def steps(slope: float = 0.1) -> CostModel:
    """One target step costs 1, plus ``slope`` for each further token."""
    one = CostCurve((1, 101), (1.0, 1.0 + 100 * slope))
    full = CostCurve((1, 101), (1.0 + 31 * slope, 1.0 + (32 * 101 - 1) * slope))
    lengths = tuple(range(9))
    model = DrafterCosts(lengths, lengths, CostCurve((1,), (0.1,)))
    names = ("model", "another")
    return CostModel(TargetCosts((1, 32), (one, full)), dict.fromkeys(names, model))


def teach(known: CostModel, batch: int, nodes: int, rest: float, drafting: float = 0.0) -> None:
    """Steps that take so long; passes were measured to take 0.1 for each node."""
    for _ in range(60):
        passes = {"model": 0.1 * nodes} if nodes else {}
        known.learn(batch, nodes * batch, rest + drafting, drafting, passes=passes)


def whole(known: CostModel, batch: int, nodes: int, passes: float, name: str) -> float:
    """Seconds of a step whose passes were measured to take so long."""
    return known.rest(batch, nodes) + known.drafting(name, batch, nodes, passes)


def test_the_rest_of_a_step_is_learnt_apart_from_drafting() -> None:
    """Truth: steps take half again as long as forwards, a draft a pass longer than measured."""
    known = steps()
    teach(known, 1, 0, 1.5)
    teach(known, 1, 4, 1.5 * 1.4, 0.5)
    teach(known, 1, 8, 1.5 * 1.8, 0.9)
    assert known.step(1, []) == pytest.approx(1.5, rel=0.02)
    assert whole(known, 1, 4, 0.4, "model") == pytest.approx(2.6, rel=0.02)
    another = whole(known, 1, 4, 0.4, "another")
    assert 2.5 <= another < 2.65, "perhaps it is the machine that is slower, as a whole"
    assert whole(known, 1, 2, 0.2, "model") == pytest.approx(1.5 * 1.2 + 0.3, rel=0.03)


def test_concurrency_is_learnt_where_it_happens() -> None:
    """Truth: forwards of many sequences take twice as long as measured, those of one do not."""
    known = steps()
    teach(known, 1, 0, 1.0)
    teach(known, 32, 0, 2 * 4.1)
    assert known.rest(1, 0) == pytest.approx(1.0, rel=0.02)
    assert known.rest(32, 0) == pytest.approx(8.2, rel=0.02)
    assert known.rest(16, 0) == pytest.approx(2 * 2.5, rel=0.1), "the nearest that is known"
    assert known.rest(2, 0) == pytest.approx(1.1, rel=0.02)


def test_without_parts_the_whole_is_shared_out() -> None:
    known = steps()
    teach(known, 1, 0, 1.0)
    for _ in range(100):
        known.learn(1, 4, 2 * (1.4 + 0.4), None, passes={"model": 0.4})
    assert whole(known, 1, 4, 0.4, "model") == pytest.approx(3.6, rel=0.05)


def test_looking_something_up_takes_time_of_its_own() -> None:
    known = steps()
    teach(known, 4, 0, 1.3)
    for _ in range(100):
        known.learn(4, 8, 1.3 + 0.8 + 0.2, 0.2, passes={"lookup": 0.0})
    assert known.drafting("lookup", 4, 2, 0.0) == pytest.approx(0.2, rel=0.02)
    assert known.drafting("lookup", 8, 2, 0.0) == pytest.approx(0.4, rel=0.02)
    assert known.drafting("lookup", 4, 0, 0.0) == 0.0


def test_uneven_batches_are_learnt_apart() -> None:
    known = steps()
    teach(known, 4, 2, 2.1, 0.2)
    even = known.rest(4, 2)
    assert known.rest(4, 2, even=False) > even, "padding is expected to cost something"
    for _ in range(200):
        known.learn(4, 8, 1.5 * 2.1 + 0.2, 0.2, even=False, passes={"model": 0.2})
        known.learn(4, 8, 2.1 + 0.2, 0.2, passes={"model": 0.2})
    assert known.rest(4, 2) == pytest.approx(2.1, rel=0.1)
    assert known.rest(4, 2, even=False) == pytest.approx(1.5 * 2.1, rel=0.1)


def test_one_hiccup_is_no_policy() -> None:
    known = steps()
    teach(known, 1, 0, 1.0)
    known.learn(1, 0, 1000.0)
    assert known.rest(1, 0) < 1.1
    known.learn(32, 0, 1000.0)
    assert known.rest(32, 0) < 1.6 * 4.1, "nor is the first step of a new load"

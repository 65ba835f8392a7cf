"""What steps take: measured at start-up, corrected by steps."""

from __future__ import annotations

import pytest

from paceline.control.acceptance import AcceptanceTracker
from paceline.control.cost import CostModel
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts


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
        if nodes:
            passes = {"model": 0.1 * nodes}
            known.learn_drafts(batch, nodes, rest + drafting, drafting, passes)
        else:
            known.learn_plain(batch, rest)


def whole(known: CostModel, batch: int, nodes: int, passes: float, name: str) -> float:
    """Seconds of a step whose passes were measured to take so long."""
    return known.verification(batch, nodes) + known.drafting(batch, {name: passes})


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
    assert known.verification(1, 0) == pytest.approx(1.0, rel=0.1)
    assert known.verification(32, 0) == pytest.approx(8.2, rel=0.02)
    assert known.verification(16, 0) == pytest.approx(2 * 2.5, rel=0.1), "the nearest that is known"
    assert known.verification(2, 0) == pytest.approx(1.1 * known.verification(1, 0), rel=0.02)


def test_without_parts_the_whole_is_shared_out() -> None:
    known = steps()
    teach(known, 1, 0, 1.0)
    for _ in range(100):
        known.learn_drafts(1, 4, 2 * (1.4 + 0.4), None, {"model": 0.4})
    assert whole(known, 1, 4, 0.4, "model") == pytest.approx(3.6, rel=0.05)


def test_looking_something_up_is_a_part_of_the_rest() -> None:
    known = steps()
    teach(known, 4, 0, 1.3)
    for _ in range(100):
        known.learn_drafts(4, 2, 1.3 + 0.8 + 0.2, 0.2, {"lookup": 0.0})
    assert known.drafting(4, {"lookup": 0.0}) == 0.0
    assert known.verification(4, 2) == pytest.approx(2.3, rel=0.02)


def test_one_hiccup_is_no_policy() -> None:
    known = steps()
    teach(known, 1, 0, 1.0)
    known.learn_plain(1, 1000.0)
    assert known.verification(1, 0) < 1.1
    known.learn_plain(32, 1000.0)
    assert known.verification(32, 0) < 1.6 * 4.1, "nor is the first step of a new load"


def test_sampled_text_has_an_acceptance_of_its_own() -> None:
    acceptance = AcceptanceTracker(1)
    acceptance.priors["model"] = (0.8,)
    (greedy,), (sampled,) = (acceptance.rates(0, "model", (None, s)) for s in (False, True))
    assert sampled == pytest.approx(greedy**2)
    for _ in range(30):
        acceptance.record(0, "model", 1, 0, (None, True))
    assert acceptance.rates(1, "model", (None, True))[0] < 0.2
    assert acceptance.rates(1, "model") == [greedy]


def test_a_lookup_is_priced_as_a_chain() -> None:
    """Its tree may have many nodes in the first levels and none in the last; mostly it has one."""
    known = steps()
    wide = DrafterCosts((0, 3, 6, 9, 9), (0,) * 5, CostCurve((1,), (0.0,)))
    known.add("lookup", wide)
    assert known.prices("lookup", 1) == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])
    known.record_fill("lookup", 1, 1, 1)
    assert known.prices("lookup", 1) == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])

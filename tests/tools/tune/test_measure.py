"""What is concluded from steps whose costs are known."""

from __future__ import annotations

import pytest

from paceline.core.costs import CostCurve
from paceline.errors import DataError
from paceline.tools.tune.decode import MeasuredStep, Run
from paceline.tools.tune.measure import _drafting, _scaled, _surroundings, _typical, _typical_pair
from tuning_methods import PLAIN, target


def step(batch: int = 1, nodes: int = 0, draft: float = 0.0, full: bool = True) -> MeasuredStep:
    """A step that takes what the target is measured to take, and 0.1 besides."""
    return MeasuredStep(batch, nodes, 1, draft, 1.0, 0.1, full)


def test_a_fixed_part_of_drafting_is_told_from_its_passes() -> None:
    rehearsed = CostCurve((1, 8, 32), (0.2, 0.4, 1.0))
    # Passes take 1.5 times what was rehearsed, 3 for eight sequences; 0.5 and 0.7 come besides.
    long = [step(1, 12, 0.5 + 12 * 0.3), step(8, 96, 0.7 + 12 * 1.2)]
    short = [step(1, 2, 0.5 + 2 * 0.3), step(8, 16, 0.7 + 2 * 1.2)]
    found = _drafting(long, short, (12, 2), rehearsed, (1, 8))
    assert found["pass_seconds"](1) == pytest.approx(0.3)
    assert found["pass_seconds"](8) == pytest.approx(1.2)
    assert found["pass_seconds"](32) == pytest.approx(3.0)  # as dear as for eight
    assert found["handling"](1) == pytest.approx(0.5)
    assert found["handling"](8) == pytest.approx(0.7)


def test_drafting_is_never_worth_less_than_nothing() -> None:
    rehearsed = CostCurve((1, 8), (0.2, 0.4))
    long, short = [step(1, 12, 1.2), step(8, 96, 2.4)], [step(1, 2, 5.0), step(8, 16, 0.1)]
    found = _drafting(long, short, (12, 2), rehearsed, (1, 8))
    assert found["pass_seconds"](1) == pytest.approx(0.0)
    assert found["handling"](1) == pytest.approx(5.0)
    assert found["pass_seconds"](8) == pytest.approx(0.2)
    assert found["handling"](8) == 0.0


def test_looking_up_takes_no_passes() -> None:
    rehearsed = CostCurve((1, 8), (1e-7, 1e-7))
    steps = [step(1, 3, 0.01), step(8, 30, 0.05)]
    found = _drafting(steps, steps, (0, 0), rehearsed, (1, 8))
    assert found["pass_seconds"] is rehearsed
    assert found["handling"](1) == pytest.approx(0.01)
    assert found["handling"](8) == pytest.approx(0.05)


def test_surroundings() -> None:
    costs = target(10_000)  # one second, whatever is verified
    plain = [
        MeasuredStep(1, 4, 1, 0.0, 1.2, 0.3, True),
        MeasuredStep(8, 32, 1, 0.0, 0.9, 0.1, True),
    ]
    found = _surroundings(plain, costs, PLAIN, (1, 8))
    assert found["dearness"](1) == pytest.approx(1.2)
    assert found["dearness"](8) == found["dearness"](32) == pytest.approx(0.9)
    assert found["node_overhead"](1) == pytest.approx(0.3 / 4)
    assert found["node_overhead"](8) == pytest.approx(0.1 / 4)


def test_typical_steps_leave_out_hiccups_and_half_full_batches() -> None:
    costs = target(10_000)
    slow = MeasuredStep(1, 0, 1, 0.0, 50.0, 0.1, True)
    assert _typical([step()] * 9 + [slow] * 3, 1, costs) == MeasuredStep(
        1, 0, 0, 0.0, 1.0, 0.1, True
    )
    assert _typical([step(1)] * 3, 2, costs) is None
    ends = [step(1, 1, 0.5, full=False)] * 5 + [step(1, 4, 2.0)]
    typical = _typical(ends, 1, costs)
    assert typical is not None
    assert typical.draft == 2.0


def test_one_run_stands_for_the_other() -> None:
    costs = target(10_000)
    alone, together = Run(1, [step()]), Run(8)
    first, second = _typical_pair([alone, together], costs)
    assert first == second
    with pytest.raises(DataError, match="too short to measure decoding on"):
        _typical_pair([together, together], costs)


def test_scaling() -> None:
    assert _scaled(step(2, 3, 0.4), 0.5) == MeasuredStep(2, 3, 1, 0.2, 0.5, 0.05, True)

"""What is concluded from steps whose costs are known."""

from __future__ import annotations

import pytest

from paceline.errors import DataError
from paceline.lab.tune.decode import MeasuredStep, Run
from paceline.lab.tune.measure import _scaled, _typical, _typical_pair
from support.tuning_methods import target


def step(batch: int = 1, nodes: int = 0, draft: float = 0.0, full: bool = True) -> MeasuredStep:
    """A step that takes what the target is measured to take, and 0.1 besides."""
    return MeasuredStep(batch, nodes, 1, draft, 1.0, 0.1, full)


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

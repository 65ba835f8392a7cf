"""What is concluded from steps whose costs are known."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.engine.driver import StepSums
from paceline.errors import DataError
from paceline.lab.tune.measure import Run, _typical, _typical_pair
from paceline.lab.tune.search import MeasuredStep
from support.tuning_methods import target


def step(batch: int = 1, nodes: int = 0, draft: float = 0.0, full: bool = True) -> MeasuredStep:
    """A step that takes what the target is measured to take, and 0.1 besides."""
    return MeasuredStep(batch, nodes, draft, 1.0, 0.1, full)


def run(batch: int, steps: Sequence[MeasuredStep] = ()) -> Run:
    return Run(batch, [*steps], StepSums(), [])


def test_typical_steps_leave_out_hiccups_and_half_full_batches() -> None:
    costs = target(10_000)
    slow = MeasuredStep(1, 0, 0.0, 50.0, 0.1)
    assert _typical(run(1, [step()] * 9 + [slow] * 3), costs) == step()
    assert _typical(run(2, [step(1)] * 3), costs) is None
    ends = [step(1, 1, 0.5, full=False)] * 5 + [step(1, 4, 2.0)]
    typical = _typical(run(1, ends), costs)
    assert typical is not None and typical.draft == 2.0


def test_one_run_stands_for_the_other() -> None:
    costs = target(10_000)
    alone, together = run(1, [step()]), run(8)
    first, second = _typical_pair([alone, together], costs)
    assert first == second
    with pytest.raises(DataError, match="too short to measure decoding on"):
        _typical_pair([together, together], costs)


def test_scaling() -> None:
    assert step(2, 3, 0.4).scaled(0.5) == MeasuredStep(2, 3, 0.2, 0.5, 0.05)

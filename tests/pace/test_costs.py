"""Costs of target steps between the numbers of sequences that were measured."""

from __future__ import annotations

import pytest

from paceline.core.costs import CostCurve, StepCosts


def flat(seconds: float) -> CostCurve:
    return CostCurve((1,), (seconds,))


def test_costs_are_linear_between_measured_numbers_of_sequences() -> None:
    costs = StepCosts(flat(1.0), flat(10.0), 32, ((4, flat(4.0)), (8, flat(5.0))))
    found = [costs.target(n, 1.0) for n in (1, 2, 4, 6, 8, 20, 32, 44)]
    assert found == pytest.approx([1.0, 2.0, 4.0, 4.5, 5.0, 7.5, 10.0, 12.5])


def test_ends_alone_are_enough() -> None:
    costs = StepCosts(flat(1.0), flat(8.0), 8)
    assert [costs.target(n, 1.0) for n in (1, 4, 8)] == pytest.approx([1.0, 4.0, 8.0])
    assert StepCosts(flat(2.0), flat(2.0), 1).target(3, 1.0) == 6.0

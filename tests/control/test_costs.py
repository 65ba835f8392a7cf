"""Costs of target steps between the numbers of sequences that were measured."""

from __future__ import annotations

import pytest

from paceline.core.costs import CostCurve, TargetCosts


def flat(seconds: float) -> CostCurve:
    return CostCurve((1,), (seconds,))


def test_costs_are_linear_between_measured_numbers_of_sequences() -> None:
    costs = TargetCosts((1, 4, 8, 32), tuple(map(flat, (1.0, 4.0, 5.0, 10.0))))
    found = [costs(n, 1.0) for n in (1, 2, 4, 6, 8, 20, 32, 44)]
    assert found == pytest.approx([1.0, 2.0, 4.0, 4.5, 5.0, 7.5, 10.0, 12.5])


def test_ends_alone_are_enough() -> None:
    costs = TargetCosts((1, 8), (flat(1.0), flat(8.0)))
    assert [costs(n, 1.0) for n in (1, 4, 8)] == pytest.approx([1.0, 4.0, 8.0])
    assert TargetCosts((1,), (flat(2.0),))(3, 1.0) == 6.0

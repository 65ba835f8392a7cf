"""What fits into a budget, by what such work took until now; in simulated time."""

from __future__ import annotations

import math

import pytest

from paceline.lab.budget import Budget
from support.simulated_clock import Clock


def took(budget: Budget, clock: Clock, kind: str, seconds: float, size: float = 1.0) -> None:
    with budget.task(kind, size):
        clock.now += seconds


def test_without_limit_everything_fits() -> None:
    clock = Clock()
    budget = Budget(None, clock)
    took(budget, clock, "text", 1e9)
    assert budget.fits("text", 1e9) and budget.left == math.inf and budget.spent == 1e9
    assert budget.part(0.1).fits("text")


def test_estimates_use_the_slowest_of_the_last_tasks() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    assert budget.fits("text")  # never tried
    for seconds in (50, 1, 4, 2):
        took(budget, clock, "text", seconds)
    assert budget.estimate("text") == pytest.approx(4 * 1.15)  # the 50 are forgotten
    assert budget.left == 43
    assert budget.fits("text", 9) and not budget.fits("text", 10)
    assert budget.fits("another")


def test_sizes_make_pieces_comparable() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    took(budget, clock, "samples", 20, size=200)
    assert budget.fits("samples", 600) and not budget.fits("samples", 800)


def test_after_the_time_limit_nothing_fits() -> None:
    clock = Clock()
    budget = Budget(10, clock)
    clock.now = 10.5
    assert not budget.fits("text")


def test_a_reserve_is_not_for_work() -> None:
    clock = Clock()
    budget = Budget(10, clock)
    budget.reserve = 4
    clock.now = 5.5
    assert budget.left == 0.5 and budget.fits("text")
    clock.now = 6.5
    assert not budget.fits("text")


def test_a_part_has_its_share_and_the_same_estimates() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    took(budget, clock, "text", 20)
    half = budget.part(0.5)
    assert half.left == 40 and half.estimate("text") == budget.estimate("text")
    took(half, clock, "text", 39)
    assert not half.fits("anything new", 1) or half.left > 0
    assert budget.estimate("text") == pytest.approx(39 * 1.15)
    clock.now += 2
    assert not half.fits("anything new") and budget.fits("anything new")


def test_failed_tasks_do_not_change_estimates() -> None:
    clock = Clock()
    budget = Budget(10, clock)
    with pytest.raises(ValueError), budget.task("text"):
        clock.now += 0.001
        raise ValueError
    assert budget.estimate("text") is None

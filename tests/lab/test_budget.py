"""A budget and its parts, in simulated time."""

from __future__ import annotations

import math

from paceline.lab.budget import Budget
from support.simulated_clock import Clock


def test_without_limit_there_is_always_time() -> None:
    clock = Clock()
    budget = Budget(None, clock)
    clock.now = 1e9
    assert budget.left == math.inf and budget.spent == 1e9
    assert budget.part(0.1).left == math.inf


def test_a_part_has_its_share_of_what_is_left() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    clock.now = 20
    half = budget.part(0.5)
    assert (budget.left, half.left, half.spent) == (80, 40, 0)
    clock.now = 65
    assert half.left == -5 and half.part(0.5).left == 0 and budget.left == 35

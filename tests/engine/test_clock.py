"""Where the seconds of steps go."""

from __future__ import annotations

import time

import pytest

from paceline.engine.clock import PhaseClock


def test_a_phase_of_the_step_under_way_and_of_all() -> None:
    clock = PhaseClock()
    for _ in range(2):
        clock.start()
        time.sleep(0.002)
        clock.lap("draft")
        clock.lap("target")
        time.sleep(0.002)
        clock.lap("draft")
        current = clock.current("draft")
        assert current is not None and current >= 0.004
        assert clock.current("verify") == 0
    totals = clock.totals()
    assert totals["draft"] >= 0.008 and clock.steps == 2
    assert totals["draft"] == pytest.approx(sum(totals.values()), rel=0.1)
    assert clock.current("draft") == 0, "no step is under way"

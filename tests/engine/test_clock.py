"""Where the seconds of steps go."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.clock import PhaseClock
from support.simulated_clock import Clock


def test_a_phase_of_the_step_under_way_and_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock()
    monkeypatch.setattr("paceline.engine.clock.time.perf_counter", time)
    clock = PhaseClock()
    for _ in range(2):
        clock.start()
        for phase, seconds in (("draft", 2.0), ("target", 1.0), ("draft", 3.0)):
            time.now += seconds
            clock.lap(phase)
        assert clock.current("draft") == 5 and clock.current("verify") == 0
        time.now += 9  # between steps
    assert clock.seconds == {"draft": 10, "target": 2, "verify": 0, "other": 0}


def test_a_gpu_is_waited_for_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    time, waits = Clock(), list[int]()

    def synchronize() -> None:
        waits.append(1)
        time.now += 4.0  # what the device still does

    monkeypatch.setattr("paceline.engine.clock.time.perf_counter", time)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    clock = PhaseClock("cuda")
    clock.start()
    time.now += 1.0
    clock.lap("target")
    assert clock.current("target") is None and not waits
    with clock.waiting():
        clock.lap("verify")
    assert clock.seconds == {"draft": 0.0, "target": 1.0, "verify": 4.0, "other": 0.0}
    with PhaseClock().waiting():
        clock.lap("other")
    assert waits == [1]

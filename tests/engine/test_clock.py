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
    assert clock.totals() == {"draft": 10, "target": 2, "verify": 0, "other": 0}
    assert clock.steps == 2
    assert clock.current("draft") == 0, "no step is under way"


class Event:
    """A CUDA event: it happens once the device gets there."""

    now = 0.0
    waited: list[float] = []  # noqa: RUF012

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self, stream: object) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        Event.waited.append(self.at)

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def test_on_a_gpu_a_step_is_read_behind_the_next_ones_synchronisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = PhaseClock("cuda")
    for step in (1, 2):
        clock.start()
        for phase in ("draft", "target"):
            Event.now += 1.0
            clock.lap(phase)
        assert Event.waited == [], "nothing may wait before the step's own synchronisation"
        assert clock.steps == 0
        clock.lap("verify")
        Event.now += 1.0
        clock.lap("draft")
        assert clock.steps == step - 1
        assert clock.current("draft") is None
    assert Event.waited == [3.0], "the end of the first step, which lies behind"
    assert clock.seconds == {"draft": 2.0, "target": 1.0, "verify": 0.0, "other": 0.0}
    assert clock.totals()["draft"] == 4.0
    assert clock.steps == 2

"""Seconds of the steps by phase: draft, target, verify and other."""

from __future__ import annotations

import time
from typing import Any

import torch

PHASES = ("draft", "target", "verify", "other")


class PhaseClock:
    """Adds up the seconds of each phase over all steps; some hundred nanoseconds a lap.

    draft: proposing and learning from commits. target: the forward. verify: distributions, rule and
    the step's transfer. other: scheduling, batching, committing.

    Between steps ``seconds`` and ``steps`` cover all steps but the last. On CUDA marks are events
    on the stream, read after the next step's synchronisation, so nothing waits for them; a phase is
    then the device's time, including waits for the host."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.steps = 0
        self._device = torch.device(device)
        self._events = self._device.type == "cuda"
        self._phases: list[str] = []
        self._marks: list[Any] = []
        self._last: tuple[list[str], list[Any]] = ([], [])

    def start(self) -> None:
        """Begin a step."""
        self._settle()
        self._last = self._phases, self._marks
        self._phases, self._marks = [], []
        self._mark()

    def lap(self, phase: str) -> None:
        """Time since the last mark belongs to ``phase``."""
        self._phases.append(phase)
        self._mark()
        if phase == "verify":  # the step has synchronised: earlier events are complete
            self._settle()

    def current(self, phase: str) -> float | None:
        """Seconds of a phase in the present step; None on CUDA, where that is known later."""
        if self._events:
            return None
        marks: list[float] = self._marks
        return sum(
            marks[index + 1] - marks[index]
            for index, name in enumerate(self._phases)
            if name == phase
        )

    def totals(self) -> dict[str, float]:
        """Seconds by phase of all steps; on CUDA this waits for the last one."""
        self._settle()
        self._last = self._phases, self._marks
        self._phases, self._marks = [], []
        self._settle()
        return dict(self.seconds)

    def _mark(self) -> None:
        if not self._events:
            self._marks.append(time.perf_counter())
            return
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def _settle(self) -> None:
        """Add the seconds of the step before the present one."""
        phases, marks = self._last
        self._last = [], []
        if len(phases) < 2:
            return  # nothing was scheduled
        self.steps += 1
        if self._events:
            marks[-1].synchronize()
        for phase, before, after in zip(phases, marks, marks[1:], strict=False):
            passed = before.elapsed_time(after) / 1e3 if self._events else after - before
            self.seconds[phase] += passed

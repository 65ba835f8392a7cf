"""Measures how long each phase of a step takes: draft, target, verify and other."""

from __future__ import annotations

import time
from typing import Any

import torch

PHASES = ("draft", "target", "verify", "other")


class PhaseClock:
    """Adds up the seconds of each phase over all steps. A lap costs some hundred nanoseconds.

    draft: proposing, and learning from commits. target: the forward. verify: distributions,
    acceptance rule and the step's transfer to the host. other: scheduling, batching, committing.

    Between steps, ``seconds`` and ``steps`` cover all steps but the last. On CUDA the time marks
    are stream events, which are read after the next step's synchronisation, so that nothing waits
    for them. A phase is then device time, including the device's waits for the host."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.steps = 0
        self._device = torch.device(device)
        self._uses_events = self._device.type == "cuda"
        self._phases: list[str] = []
        self._marks: list[Any] = []
        self._previous: tuple[list[str], list[Any]] = ([], [])  # phases and marks of the last step

    def start(self) -> None:
        """Begin a step."""
        self._add_previous_step()
        self._previous = self._phases, self._marks
        self._phases, self._marks = [], []
        self._mark()

    def lap(self, phase: str) -> None:
        """Count the time since the last mark as ``phase``."""
        self._phases.append(phase)
        self._mark()
        if phase == "verify":  # the step has synchronised, so the previous events are complete
            self._add_previous_step()

    def current(self, phase: str) -> float | None:
        """Seconds of a phase in the step in progress; None on CUDA, where they are known later."""
        if self._uses_events:
            return None
        marks: list[float] = self._marks
        return sum(
            marks[index + 1] - marks[index]
            for index, name in enumerate(self._phases)
            if name == phase
        )

    def totals(self) -> dict[str, float]:
        """Seconds by phase of all steps, the last included; on CUDA this waits for the device."""
        self._add_previous_step()
        self._previous = self._phases, self._marks
        self._phases, self._marks = [], []
        self._add_previous_step()
        return dict(self.seconds)

    def _mark(self) -> None:
        if not self._uses_events:
            self._marks.append(time.perf_counter())
            return
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def _add_previous_step(self) -> None:
        """Add the previous step's time to the totals, once."""
        phases, marks = self._previous
        self._previous = [], []
        if len(phases) < 2:
            return  # nothing was scheduled
        self.steps += 1
        if self._uses_events:
            marks[-1].synchronize()
        for phase, before, after in zip(phases, marks, marks[1:], strict=False):
            elapsed = before.elapsed_time(after) / 1e3 if self._uses_events else after - before
            self.seconds[phase] += elapsed

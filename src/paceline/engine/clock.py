"""Measures how long each phase of a step takes: draft, target, verify and other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PHASES = ("draft", "target", "verify", "other")


class PhaseClock:
    """Adds up the seconds of each phase over all steps. A lap costs some hundred nanoseconds.

    draft: proposing, and learning from commits. target: the forward. verify: distributions,
    acceptance rule and the step's transfer to the host. other: scheduling, batching, committing.

    It is the host's clock. On CUDA the work of all phases counts as verify, where the host waits
    for it, except within ``waiting``."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._step = dict.fromkeys(PHASES, 0.0)  # of the step in progress
        self._on_cuda, self._waits = torch.device(device).type == "cuda", False
        self._mark = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the device at the end of every phase within the block."""
        self._waits = self._on_cuda
        try:
            yield
        finally:
            self._waits = False

    def start(self) -> None:
        """Begin a step."""
        self._step = dict.fromkeys(PHASES, 0.0)
        self._mark = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Count the time since the last mark as ``phase``."""
        if self._waits:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._step[phase] += now - self._mark
        self.seconds[phase] += now - self._mark
        self._mark = now

    def current(self, phase: str) -> float | None:
        """Seconds of a phase in the step in progress; None on CUDA, where they are not known."""
        return None if self._on_cuda else self._step[phase]

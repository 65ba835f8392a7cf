"""A wall-clock budget, and how it was spent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]


class Budget:
    """``seconds`` from now on (None: no limit)."""

    def __init__(self, seconds: float | None = None, clock: Clock = time.monotonic) -> None:
        self.seconds = seconds
        self._clock, self._start = clock, clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._start

    @property
    def left(self) -> float:
        return math.inf if self.seconds is None else self.seconds - self.spent

    def part(self, share: float) -> Budget:
        """A budget of this ``share`` of what is left."""
        seconds = None if self.seconds is None else max(0.0, self.left) * share
        return Budget(seconds, self._clock)


@dataclass(frozen=True)
class Spending:
    """How a budget of ``seconds`` (None: no limit) was spent. ``done`` and ``wanted``: number of
    tasks by kind; ``missing``: names of those that were not begun."""

    seconds: float | None
    spent: float
    done: dict[str, int]
    wanted: dict[str, int]
    missing: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        amounts = (f"{self.done[kind]} of {count} {kind}" for kind, count in self.wanted.items())
        line = f"{self.spent:.0f} s completed {', '.join(amounts)}."
        if self.missing:
            line += f" Not measured: {', '.join(self.missing)}."
        if self.seconds is not None and (self.missing or self.done != self.wanted):
            line += " More --seconds measure the rest."
        return line

"""A wall-clock budget. Whether a task still fits is estimated from earlier tasks of its kind."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]
_REMEMBERED = 3  # tasks of a kind from which an estimate is made
_CAUTION = 1.15  # on a shared machine the next task may take longer than the last ones


class Budget:
    """``seconds`` from now on (None: no limit), of which ``reserve`` are kept for the end."""

    def __init__(self, seconds: float | None = None, clock: Clock = time.monotonic) -> None:
        self.seconds = seconds
        self.reserve = 0.0
        self._clock, self._start = clock, clock()
        self._took: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))

    @property
    def spent(self) -> float:
        return self._clock() - self._start

    @property
    def left(self) -> float:
        """Seconds left, without the reserve."""
        return math.inf if self.seconds is None else self.seconds - self.reserve - self.spent

    @contextmanager
    def task(self, kind: str, size: float = 1.0) -> Iterator[None]:
        """Time a task of ``size`` units of its kind, for later estimates (unless it raises)."""
        start = self._clock()
        yield
        self._took[kind].append((self._clock() - start) / size)

    def estimate(self, kind: str) -> float | None:
        """Seconds per unit of this kind, by the slowest of the last few tasks, if any."""
        took = self._took.get(kind)
        return max(took) * _CAUTION if took else None

    def fits(self, kind: str, size: float = 1.0) -> bool:
        """Whether a task will end in time. The first of its kind fits if any time is left."""
        return self.seconds is None or (self.estimate(kind) or 0.0) * size < self.left

    def part(self, share: float) -> Budget:
        """A budget of this ``share`` of what is left, with the same estimates."""
        seconds = None if self.seconds is None else max(0.0, self.left) * share
        part = Budget(seconds, self._clock)
        part._took = self._took
        return part


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
        if self.missing or self.done != self.wanted:
            line += " More --seconds measure the rest."
        return line

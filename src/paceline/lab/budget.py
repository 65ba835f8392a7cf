"""A wall-clock budget: what still fits is judged by what such work took until now."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

Clock = Callable[[], float]
_REMEMBERED = 3  # how many of a kind an estimate is made from
_CAUTION = 1.15  # a shared machine's next piece may take longer than its last ones


class Budget:
    """So many seconds from now on; None is without end. ``fits``: whether one more piece of a kind
    of work will end in time, by the slowest of the last few; if none was tried, whether any time is
    left. ``reserve``: seconds kept for what must be done at the end."""

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
        """Seconds for work, the reserve not among them."""
        return math.inf if self.seconds is None else self.seconds - self.reserve - self.spent

    @contextmanager
    def piece(self, kind: str, size: float = 1.0) -> Iterator[None]:
        """A piece of work, ``size`` units of its kind. One that fails teaches nothing."""
        start = self._clock()
        yield
        self._took[kind].append((self._clock() - start) / size)

    def estimate(self, kind: str) -> float | None:
        """Seconds of one unit of this kind; None if it was never tried."""
        took = self._took.get(kind)
        return max(took) * _CAUTION if took else None

    def fits(self, kind: str, size: float = 1.0) -> bool:
        return self.seconds is None or (self.estimate(kind) or 0.0) * size < self.left

    def part(self, share: float) -> Budget:
        """A budget of this ``share`` of what is left, with the same experience."""
        seconds = None if self.seconds is None else max(0.0, self.left) * share
        part = Budget(seconds, self._clock)
        part._took = self._took
        return part


@dataclass(frozen=True)
class Spending:
    """``seconds``: the budget, None without; ``spent``: in all. ``done`` and ``wanted``: so many of
    each kind of work; ``missing``: what was not begun."""

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

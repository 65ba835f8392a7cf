"""What forwards cost on this machine, in seconds: curves through measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


def _between(points: Sequence[float], values: Sequence[float], point: float) -> float:
    """Linear between points; beyond the ends the outermost slope goes on."""
    right = min(max(bisect_left(points, point), 1), len(points) - 1)
    x0, x1, y0, y1 = points[right - 1], points[right], values[right - 1], values[right]
    return y0 + (y1 - y0) * (point - x0) / (x1 - x0)


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward by number of tokens, linear between measured points."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, count: float) -> float:
        """Seconds for ``count`` tokens; beyond the last point the last slope goes on."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        return max(_between(self.tokens, self.seconds, count), min(self.seconds))


@dataclass(frozen=True)
class TargetCosts:
    """Seconds of a target forward: for each number of sequences, by tokens PER sequence.

    The price of a sequence more falls with their number, so some numbers between one and a full
    batch are measured: from the ends alone eight of 32 looked 14 % cheaper than they were.
    """

    batches: tuple[int, ...]
    curves: tuple[CostCurve, ...]

    def __call__(self, batch: float, tokens_each: float) -> float:
        """A forward over ``tokens_each`` tokens of each of ``batch`` sequences."""
        if len(self.batches) == 1:
            return self.curves[0](tokens_each) * batch / self.batches[0]
        right = min(max(bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        ends = slice(right - 1, right + 1)
        values = [curve(tokens_each) for curve in self.curves[ends]]
        return max(_between(self.batches[ends], values, batch), 1e-9)

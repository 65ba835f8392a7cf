"""What forwards cost on this machine, in seconds: curves through measured points."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward by number of tokens, linear between measured points."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, count: float) -> float:
        """Seconds for ``count`` tokens; beyond the last point the last slope goes on."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        right = min(max(bisect_left(self.tokens, count), 1), len(self.tokens) - 1)
        x0, x1 = self.tokens[right - 1], self.tokens[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(y0 + (y1 - y0) * (count - x0) / (x1 - x0), min(self.seconds))


@dataclass(frozen=True)
class StepCosts:
    """What a target forward costs, from a lone sequence up to a full batch.

    Seconds by tokens PER sequence: ``one`` for a lone one, ``full`` for ``batch`` of them, and
    ``between`` for some numbers of sequences in between. The price of a sequence more falls with
    their number: from the ends alone eight of 32 looked 14 % cheaper than they were.
    """

    one: CostCurve
    full: CostCurve
    batch: int
    between: tuple[tuple[int, CostCurve], ...] = ()

    def target(self, sequences: int, tokens_each: float) -> float:
        """A target forward over ``tokens_each`` tokens of each of ``sequences`` sequences."""
        if self.batch == 1:
            return self.one(tokens_each) * sequences
        points = [(1, self.one), *self.between, (self.batch, self.full)]
        right = next((i for i, (n, _) in enumerate(points) if n >= sequences), len(points) - 1)
        (low, left), (high, curve) = points[max(right, 1) - 1], points[max(right, 1)]
        few = left(tokens_each)
        return few + (sequences - low) / (high - low) * (curve(tokens_each) - few)

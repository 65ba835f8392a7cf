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

    ``one`` and ``full``: seconds by tokens PER sequence, for one sequence and for ``batch``.
    """

    one: CostCurve
    full: CostCurve
    batch: int

    def target(self, sequences: int, tokens_each: float) -> float:
        """A target forward over ``tokens_each`` tokens of each of ``sequences`` sequences."""
        alone = self.one(tokens_each)
        if self.batch == 1:
            return alone * sequences
        share = (sequences - 1) / (self.batch - 1)
        return alone + share * (self.full(tokens_each) - alone)

"""What a target step and a draft step cost on this machine, measured once at start-up."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


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
    """What steps cost, in seconds, from a lone sequence up to a full batch.

    ``one`` and ``full``: a target forward by tokens PER sequence, for one sequence and for
    ``batch`` of them. ``draft``: one pass of the drafter by number of sequences.
    """

    one: CostCurve
    full: CostCurve
    batch: int
    draft: CostCurve

    def target(self, sequences: int, tokens_each: float) -> float:
        """A target forward over ``tokens_each`` tokens of each of ``sequences`` sequences."""
        alone = self.one(tokens_each)
        if self.batch == 1:
            return alone * sequences
        share = (sequences - 1) / (self.batch - 1)
        return alone + share * (self.full(tokens_each) - alone)


def synchronise(device: torch.device) -> None:
    """Wait for the device; only measurements need this."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    run: Callable[[int], None],
    counts: Sequence[int],
    device: torch.device,
    rounds: int = 5,
) -> CostCurve:
    """Cost of ``run(count)`` at each count: the best of ``rounds``, alternating between counts.

    The minimum, because noise on a shared machine only ever adds; made monotone, because a
    forward over more tokens never costs less.
    """
    best = [float("inf")] * len(counts)
    for count in counts:
        run(count)  # warm-up: allocations, kernel selection
    for _ in range(rounds):
        for index, count in enumerate(counts):
            synchronise(device)
            start = time.perf_counter()
            run(count)
            synchronise(device)
            best[index] = min(best[index], time.perf_counter() - start)
    monotone: list[float] = []
    for value in best:
        monotone.append(max(value, monotone[-1] if monotone else 0.0))
    return CostCurve(tuple(counts), tuple(monotone))

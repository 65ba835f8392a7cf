"""Measuring, once at start-up, what target steps and drafter passes cost on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paceline.core.costs import CostCurve


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

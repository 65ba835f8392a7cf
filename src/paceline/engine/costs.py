"""Measuring, once at start-up, what target steps and drafter passes cost on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from paceline.core.costs import CostCurve

_BUDGET = 0.3  # seconds in which rounds beyond those asked for may begin


def synchronise(device: torch.device) -> None:
    """Wait for the device; only measurements need this."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    run: Callable[[int], None],
    counts: Sequence[int],
    device: torch.device,
    rounds: int = 5,
    budget: float = _BUDGET,
) -> CostCurve:
    """Cost of ``run(count)`` at each count: the best of ``rounds``, alternating between counts.

    The minimum, because noise on a shared machine only ever adds; runs that take next to no time
    are measured some rounds more. Made monotone: fewer tokens never cost more, so what more of
    them have taken is a bound.
    """
    best = [float("inf")] * len(counts)
    for count in counts:
        run(count)  # warm-up: allocations, kernel selection
    began = time.perf_counter()
    done = 0
    while done < rounds or (done < 4 * rounds and time.perf_counter() - began < budget):
        done += 1
        for index, count in enumerate(counts):
            synchronise(device)
            start = time.perf_counter()
            run(count)
            synchronise(device)
            best[index] = min(best[index], time.perf_counter() - start)
    bounds = accumulate(reversed(best), min)
    return CostCurve(tuple(counts), tuple(bounds)[::-1])

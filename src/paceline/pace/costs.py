"""Measuring, once at start-up, what target steps and drafter passes cost on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from paceline.core.costs import CostCurve
from paceline.core.tree import chain_parents
from paceline.model.paged.cache import Feed, PagedCache
from paceline.model.target import CausalModel

_BUDGET = 0.3  # seconds in which rounds beyond those asked for may begin


def synchronise(device: torch.device) -> None:
    """Wait for the device; only measurements need this."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def made_up_chains(
    target: CausalModel,
    cache: PagedCache,
    sequences: int,
    context: int,
    longest: int,
    features: Sequence[int] = (),
) -> Iterator[Callable[[int, int], None]]:
    """Gives ``run(n, count)``: a target forward over ``count`` tokens of each of n sequences.

    They are ``sequences`` made-up ones with ``context`` cached tokens and room for ``longest``; the
    cache is as before afterwards.
    """
    ids = range(-sequences, 0)
    tokens = torch.zeros(longest, dtype=torch.int64, device=target.device)

    def run(number: int, count: int) -> None:
        chain, drafted = chain_parents(count - 1), tokens[: count - 1] if count > 1 else None
        feeds = [Feed(i, context, (0,), chain, drafted) for i in ids[:number]]
        target(cache.batch_of(feeds), cache, features).logits.argmax(-1)

    for seq_id in ids:
        cache.admit(seq_id, [0])
        cache.reserve(seq_id, context + longest)
    try:
        yield run
    finally:
        for seq_id in ids:
            cache.free(seq_id)


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

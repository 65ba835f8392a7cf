"""Measures how long target steps and draft forwards take on this machine, outside decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from paceline.core.batch import Span
from paceline.core.costs import CostCurve, TargetCosts
from paceline.core.tree import chain_parents
from paceline.model.paged.cache import PagedCache
from paceline.model.target import CausalModel

_BUDGET = 0.3  # seconds within which another round may begin
_MAX_ROUNDS = 20
_CONTEXT = 64  # cached tokens of the sequences that are measured


def synchronise(device: torch.device) -> None:
    """Wait for the device; only measurements do this."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(
    run: Callable[[int], None],
    counts: Sequence[int],
    device: torch.device,
    rounds: int = 5,
    budget: float = _BUDGET,
) -> CostCurve:
    """The cost of ``run(count)`` for each of ``counts``: the minimum over ``rounds`` rounds, and
    over more of them within ``budget`` seconds. A round runs each count once. The result is
    monotone: a count costs at most what a larger one took."""
    best = [float("inf")] * len(counts)
    for count in counts:
        run(count)  # warm-up: allocations, kernel selection
    began = time.perf_counter()
    for done in range(max(4 * rounds, _MAX_ROUNDS)):
        if done >= rounds and time.perf_counter() - began >= budget:
            break
        for index, count in enumerate(counts):
            synchronise(device)
            start = time.perf_counter()
            run(count)
            synchronise(device)
            best[index] = min(best[index], time.perf_counter() - start)
    bounds = accumulate(reversed(best), min)
    return CostCurve(tuple(counts), tuple(bounds)[::-1])


@torch.inference_mode()
def measure_target(
    target: CausalModel,
    cache: PagedCache,
    counts: Mapping[int, Sequence[int]],
    rounds: int = 5,
    budget: float | None = None,
    begin: Callable[[int], AbstractContextManager[Any] | None] = lambda batch: nullcontext(),
) -> TargetCosts:
    """Measure target forwards over chains after a short context; the cache is unchanged afterwards.

    ``counts``: for each batch size, in this order, the tokens per sequence to measure; batch sizes
    for which the cache has no room are left out. ``rounds`` and ``budget`` (default: 0.06 s per
    round) apply to each batch size, see ``measure``. ``begin(batch)`` gives a context manager for
    each batch size; None ends the measurement."""
    positions = min(target.max_positions, cache.num_blocks * cache.block_size)
    context = max(1, min(_CONTEXT, positions // 2))
    limit = positions - context
    lengths = {batch: [n for n in asked if n <= limit] or [1] for batch, asked in counts.items()}
    longest = context + max(tokens[-1] for tokens in lengths.values())
    max_batch = max(1, cache.num_blocks // -(-longest // cache.block_size))
    sizes = [batch for batch in lengths if batch <= max_batch] or [1]
    ids = range(-max(sizes), 0)
    tokens = torch.zeros(longest, dtype=torch.int64, device=target.device)

    def run(batch: int, count: int) -> None:
        chain, drafted = chain_parents(count - 1), tokens[: count - 1] if count > 1 else ()
        spans = [Span.of(i, context, (0,), chain, drafted) for i in ids[:batch]]
        # Like a greedy step: a backend that chooses tokens itself writes no logits.
        out = target(cache.batch_of(spans, choices_only=True), cache)
        if out.greedy is None:
            out.logits.argmax(-1)

    curves: dict[int, CostCurve] = {}
    for seq_id in ids:
        cache.admit(seq_id, [0])
        cache.reserve(seq_id, longest)
    try:
        for size in sizes:
            measurement = begin(size)
            if measurement is None and curves:
                break
            with measurement or nullcontext():
                seconds = 0.06 * rounds if budget is None else budget
                chains = lengths.get(size, [1])
                curves[size] = measure(partial(run, size), chains, target.device, rounds, seconds)
    finally:
        for seq_id in ids:
            cache.free(seq_id)
    batches = tuple(sorted(curves))
    return TargetCosts(batches, tuple(curves[size] for size in batches))

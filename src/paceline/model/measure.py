"""Measured seconds of target steps and drafter passes on this machine, outside decoding."""

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

_BUDGET = 0.3  # seconds in which further rounds may begin
_MOST_ROUNDS = 20
_CONTEXT = 64  # cached tokens of the sequences that measurements run on


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
    """Cost of ``run(count)`` at each count: the least of ``rounds``, and of more within ``budget``
    seconds, alternating between counts. Monotone: what more tokens took bounds fewer."""
    best = [float("inf")] * len(counts)
    for count in counts:
        run(count)  # warm-up: allocations, kernel selection
    began = time.perf_counter()
    done = 0
    most = max(4 * rounds, _MOST_ROUNDS)
    while done < rounds or (done < most and time.perf_counter() - began < budget):
        done += 1
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
    """Target forwards over chains after a short context; leaves the cache unchanged. ``counts``:
    tokens per sequence by number of sequences, in the order of measuring; those for which the cache
    has no room are left out. ``rounds``, ``budget`` of each: see ``measure``, by default 0.06 s a
    round. ``begin`` gives a context for each of them; None ends the measuring."""
    positions = min(target.max_positions, cache.num_blocks * cache.block_size)
    context = max(1, min(_CONTEXT, positions // 2))
    most = positions - context
    wanted = {batch: [n for n in asked if n <= most] or [1] for batch, asked in counts.items()}
    reach = context + max(lengths[-1] for lengths in wanted.values())
    room = max(1, cache.num_blocks // -(-reach // cache.block_size))
    sizes = [batch for batch in wanted if batch <= room] or [1]
    ids = range(-max(sizes), 0)
    tokens = torch.zeros(reach, dtype=torch.int64, device=target.device)

    def run(batch: int, count: int) -> None:
        chain, drafted = chain_parents(count - 1), tokens[: count - 1] if count > 1 else ()
        spans = [Span.of(i, context, (0,), chain, drafted) for i in ids[:batch]]
        # As a greedy step: where the backend chooses, no logits are written and read again.
        out = target(cache.batch_of(spans, choices_only=True), cache)
        if out.greedy is None:
            out.logits.argmax(-1)

    curves: dict[int, CostCurve] = {}
    for seq_id in ids:
        cache.admit(seq_id, [0])
        cache.reserve(seq_id, reach)
    try:
        for size in sizes:
            around = begin(size)
            if around is None and curves:
                break
            with around or nullcontext():
                seconds = 0.06 * rounds if budget is None else budget
                lengths = wanted.get(size, [1])
                curves[size] = measure(partial(run, size), lengths, target.device, rounds, seconds)
    finally:
        for seq_id in ids:
            cache.free(seq_id)
    batches = tuple(sorted(curves))
    return TargetCosts(batches, tuple(curves[size] for size in batches))

"""What the forwards of a step take, measured outside decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.core.tree import chain_parents
from paceline.draft.model import ModelDrafter
from paceline.model.paged.cache import Feed, PagedCache
from paceline.model.target import CausalModel
from paceline.pace.costs import synchronise

if TYPE_CHECKING:
    from paceline.engine.engine import Engine


@dataclass(frozen=True)
class Alone:
    """Seconds of forwards measured outside decoding, medians.

    ``plain``: the target over one token of each of ``plain_batch`` sequences. ``check``: over the
    drafts of ``batch`` sequences as well. ``draft``: all passes of the drafter for these.
    ``catch_up``: what a second token makes a draft model's first pass dearer; after a fully
    accepted draft it has two to read.
    """

    plain: float
    check: float
    draft: float
    catch_up: float = 0.0
    batch: int = 1
    plain_batch: int = 1


@torch.inference_mode()
def measure_alone(
    engine: Engine,
    nodes: float,
    passes: float,
    batch: int = 1,
    context: int = 64,
    rounds: int = 25,
    plain_batch: int | None = None,
) -> Alone:
    """Time the forwards of a step for ``batch`` sequences with ``context`` cached tokens each.

    ``nodes`` and drafter ``passes`` of a step may be means, and so fractions. ``plain_batch``: of
    a plain step, where that had fewer sequences or more. The engine must be idle; it is as before
    afterwards. Medians of ``rounds``, in which the parts follow each other as in decoding, so that
    each finds the processor's caches as it would there.
    """
    target, device = engine.target, engine.target.device
    low = int(nodes)
    fewer = _forward(target, engine.cache, batch, context, 1 + low, engine.drafter.features)
    more = _forward(target, engine.cache, batch, context, 2 + low, engine.drafter.features)
    alike = batch if plain_batch is None else plain_batch
    one = _forward(target, engine.cache, alike, context, 1, engine.drafter.features)
    whole_passes = max(1, round(passes)) if passes else 0

    def draft() -> None:
        for _ in range(whole_passes):
            engine.drafter.rehearse(batch)

    parts = {"warm": one, "plain": one, "draft": draft, "fewer": fewer}
    if nodes > low:
        parts |= {"again": draft, "more": more}
    if isinstance(engine.drafter, ModelDrafter):
        model, cache = engine.drafter.model, engine.drafter.cache
        reads = {n: _forward(model, cache, batch, context, n) for n in (1, 2)}
        # Once before: the first after a target forward finds the processor's caches cold.
        parts |= {"read": reads[1], "read one": reads[1], "read two": reads[2]}
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(1 + rounds):
        for name, part in parts.items():
            synchronise(device)
            start = time.perf_counter()
            part()
            synchronise(device)
            seconds[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    check = middle["fewer"]
    check += (nodes - low) * (middle.get("more", check) - check)
    return Alone(
        plain=middle["plain"],
        check=check,
        draft=middle["draft"] * passes / whole_passes if passes else 0.0,
        catch_up=max(0.0, middle.get("read two", 0.0) - middle.get("read one", 0.0)),
        batch=batch,
        plain_batch=alike,
    )


def _forward(
    model: CausalModel,
    cache: PagedCache,
    batch: int,
    context: int,
    tokens: int,
    features: Sequence[int] = (),
) -> Callable[[], None]:
    """A forward over ``tokens`` of each of ``batch`` made-up sequences, cache blocks included.

    Of as many as the cache has room for.
    """
    batch = max(1, min(batch, cache.num_blocks // -(-(1 + tokens) // cache.block_size)))
    capacity = cache.num_blocks // batch * cache.block_size - tokens
    context = max(1, min(context, model.max_positions - tokens, capacity))
    drafted = torch.zeros(tokens - 1, dtype=torch.int64, device=model.device)
    ids = range(-batch, 0)

    def run() -> None:
        chain = chain_parents(tokens - 1)
        feeds = [Feed(i, context, (0,), chain, drafted if tokens > 1 else None) for i in ids]
        model(cache.batch_of(feeds), cache, tuple(features)).logits.argmax(-1)

    def admitted() -> None:
        for seq_id in ids:
            cache.admit(seq_id, [0])
            cache.reserve(seq_id, context + tokens)
        try:
            run()
        finally:
            for seq_id in ids:
                cache.free(seq_id)

    return admitted

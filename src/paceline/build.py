"""Composition: a target, a prepared drafter and numbers in, a running engine out."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from paceline.core.tree import chain_parents
from paceline.draft.base import Drafter, NoDrafter
from paceline.drafters import BLOCK_SIZE, DraftContext, Prepared
from paceline.engine.controller import AdaptiveLength, Controller, FixedLength
from paceline.engine.costs import CostCurve, StepCosts, measure
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler, SchedulerConfig
from paceline.errors import CacheMemoryError, ConfigError
from paceline.model.cache import Feed, PagedCache, bytes_per_token
from paceline.model.target import CausalModel
from paceline.verify.rule import Verifier

RULES = ("auto", "token", "block", "coupled")
_PROBE_CONTEXT = 64  # cached tokens of the sequences that measurements run on


@dataclass(frozen=True)
class EngineOptions:
    """Everything about an engine that is not a model. Checked on construction."""

    max_batch_size: int = 8
    kv_cache_memory: int | None = None  # bytes, target and draft together; None: cache_blocks
    draft_length: int | str = "auto"  # tree levels; "auto" adapts, 0 decodes plainly
    max_draft_length: int = 8  # of the adaptive length
    prefill_chunk: int = 512
    prefix_sharing: bool = True  # requests that begin alike share cache blocks
    rule: str = "auto"

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ConfigError(f"max_batch_size is {self.max_batch_size}; it must be at least 1")
        if self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk is {self.prefill_chunk}; it must be at least 1")
        if self.rule not in RULES:
            raise ConfigError(f"rule is {self.rule!r}; use one of {', '.join(RULES)}")
        if self.max_draft_length < 1:
            raise ConfigError(f"max_draft_length is {self.max_draft_length}; use at least 1")
        length = self.draft_length
        if length != "auto" and not (isinstance(length, int) and 0 <= length <= 64):
            raise ConfigError(f'draft_length is {length!r}; use "auto" or a number from 0 to 64')


def seeded_generator(device: torch.device, seed: int | None) -> torch.Generator:
    """Randomness of requests without a seed of their own; None takes it from the system."""
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(os.urandom(7), "little") if seed is None else seed)
    return generator


def cache_blocks(options: EngineOptions, target: CausalModel, draft_bytes: int = 0) -> int:
    """Blocks of the cache; a drafter's own cache, of ``draft_bytes`` a token, has as many.

    By default enough for a full batch of full contexts, but at most a quarter of the free memory
    of the device. Raises CacheMemoryError if not even a few blocks fit.
    """
    own_bytes = bytes_per_token(target.cache_shapes, target.dtype)
    per_block = BLOCK_SIZE * (own_bytes + draft_bytes)
    # One spare block a sequence: drafts reach beyond the committed tokens.
    wanted = options.max_batch_size * (-(-target.max_positions // BLOCK_SIZE) + 1)
    memory = options.kv_cache_memory
    if memory is None:
        affordable = _free_memory(target.device) // 4 // per_block
    else:
        affordable = wanted = memory // per_block
    blocks = min(wanted, affordable)
    if blocks < 2:
        raise CacheMemoryError(
            f"the cache needs at least {2 * per_block:,} bytes, but has "
            f"{blocks * per_block if memory is None else memory:,}; raise kv_cache_memory"
        )
    return blocks


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def build_engine(
    target: CausalModel, prepared: Prepared, options: EngineOptions, generator: torch.Generator
) -> Engine:
    """Cache, drafter, scheduler, verifier and controller around a target.

    ``generator`` is the randomness of requests without a seed. Raises CacheMemoryError.
    """
    blocks = cache_blocks(options, target, prepared.cache_bytes)
    shapes, device = target.cache_shapes, target.device
    cache = PagedCache(shapes, blocks, BLOCK_SIZE, target.dtype, device, options.prefix_sharing)
    drafter = prepared.build(DraftContext(target, cache, generator))
    controller: Controller
    if options.draft_length == "auto" and not isinstance(drafter, NoDrafter):
        costs = measure_costs(target, cache, drafter, options)
        controller = AdaptiveLength(
            costs, options.max_draft_length, drafter.max_nodes, drafter.passes
        )
    else:
        length = options.draft_length if isinstance(options.draft_length, int) else 0
        controller = FixedLength(length)
    limits = SchedulerConfig(
        max_batch_size=options.max_batch_size,
        prefill_chunk=options.prefill_chunk,
        max_step_tokens=max(2048, options.prefill_chunk),
        max_positions=target.max_positions,
    )
    scheduler = Scheduler(limits, cache, drafter.max_nodes, drafter.forget)
    verifier = Verifier(options.rule, generator)
    return Engine(target, cache, drafter, verifier, scheduler, controller)


@torch.inference_mode()
def measure_costs(
    target: CausalModel, cache: PagedCache, drafter: Drafter, options: EngineOptions
) -> StepCosts:
    """Measure what steps cost on this machine; the cache is as before afterwards."""
    context = max(1, min(_PROBE_CONTEXT, target.max_positions // 2))
    deepest = drafter.max_nodes(options.max_draft_length)
    room = min(target.max_positions, cache.num_blocks * BLOCK_SIZE) - context - 1
    nodes = sorted({n for n in (0, 1, 2, 4, 7, deepest) if n <= min(deepest, room)})
    blocks_each = -(-(context + 1 + nodes[-1]) // BLOCK_SIZE)
    batch = max(1, min(options.max_batch_size, cache.num_blocks // blocks_each))
    ids = range(-batch, 0)
    for seq_id in ids:
        cache.admit(seq_id, [0])
        cache.reserve(seq_id, context + 1 + nodes[-1])
    tokens = torch.zeros(nodes[-1], dtype=torch.int64, device=target.device)

    def curve(sequences: int) -> CostCurve:
        """A step of chains over a short context, by tokens per sequence."""

        def run(count: int) -> None:
            chain, drafted = chain_parents(count - 1), tokens[: count - 1] if count > 1 else None
            feeds = [Feed(i, context, (0,), chain, drafted) for i in ids[:sequences]]
            target(cache.pack(feeds), cache, drafter.features).logits.argmax(-1)

        return measure(run, [1 + n for n in nodes], target.device)

    try:
        one = curve(1)
        full = curve(batch) if batch > 1 else one
    finally:
        for seq_id in ids:
            cache.free(seq_id)
    draft = measure(drafter.rehearse, sorted({1, batch}), target.device)
    return StepCosts(one, full, batch, draft)

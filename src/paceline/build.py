"""Composition root: builds an engine from a target, a prepared drafter and options."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from paceline.control.adaptive import AdaptiveController
from paceline.control.controller import METHODS, Controller, FixedLength
from paceline.control.cost import CostModel
from paceline.core.costs import CostCurve, TargetCosts
from paceline.draft.base import (
    Drafter,
    DrafterTraits,
    LookupDrafter,
    NoDrafter,
    costs_of,
    with_members,
)
from paceline.draft.heads.features import MAX_PENDING_FEATURES
from paceline.draft.hybrid import HybridDrafter, Router
from paceline.draft.spec import DraftContext, DraftSpec, LoadContext, NoDraft, PreparedDraft
from paceline.draft.text_index import Predictions
from paceline.drafters import BLOCK_SIZE, DRAFTERS, RECORDS, DraftLike, parse_draft, prepare_all
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler, SchedulerConfig
from paceline.errors import CacheMemoryError, ConfigError
from paceline.model.measure import measure, measure_target
from paceline.model.paged.cache import PagedCache, blocks_within, bytes_per_token
from paceline.model.paged.int8 import cache_dtype
from paceline.model.paged.states import PENDING_SLOTS
from paceline.model.target import CausalModel
from paceline.model.tokenizer import Tokenizer
from paceline.settings import EngineSettings, entries
from paceline.verify.logprobs import max_scored_rows, scoring_bytes
from paceline.verify.verifier import Verifier

# Start-up measures forwards over these numbers of tokens per sequence, up to so many rows in all
# (beyond, costs grow linearly). It takes about a second and a half for a model of 135M.
_MEASURED_TOKENS, _MAX_MEASURED_ROWS = (1, 2, 3, 5, 8, 16, 32), 64
_MEASURING_SECONDS = 1.0  # after this time no further batch size is measured
_SECONDS_PER_BATCH_SIZE = 0.15
_MAX_DRAFT_LENGTH = 8  # limit of "auto"; higher for drafters that run no forward
_WARM_UP_SECONDS = 0.1  # for measuring a drafter's pass
_COSTLESS = 4  # drafters without forwards may draft this many times as many levels
# Slots for states of recurrent layers per sequence: the committed state, those of a step's pending
# tokens and those of its draft's nodes; at least the first two. The prefix cache uses spare slots.
_STATES_PER_SEQUENCE, MIN_STATES_PER_SEQUENCE = 12, 1 + PENDING_SLOTS


@dataclass(frozen=True)
class EngineOptions(EngineSettings):
    """All settings of an engine, checked on construction."""

    max_batch_size: int = 8
    draft_length: int | str = "auto"  # tree levels; "auto" adapts, 0 decodes plainly
    rule: str = "auto"
    controller: Controller | None = None  # replaces the adaptive controller
    costs: TargetCosts | None = None  # of target steps; None: measured at start-up

    def __post_init__(self) -> None:
        missing = [name for name in METHODS if not hasattr(self.controller, name)]
        if self.controller is not None and missing:
            raise ConfigError(
                f"controller is {self.controller!r}; it lacks {', '.join(missing)}: derive it from "
                "paceline.control.controller.Controller"
            )
        for entry in entries(EngineSettings):
            value = getattr(self, entry.name)
            # Objects, such as torch dtypes, and sizes given in bytes need no parsing.
            is_plain = isinstance(value, (str, int, float, list, tuple, dict))
            is_bytes = entry.kind == "size" and type(value) is int
            if is_plain and not is_bytes:
                object.__setattr__(self, entry.name, entry.read(value, entry.name))

    def positions(self, target: CausalModel) -> int:
        """The most tokens of a sequence: ``max_model_len``, or the context length of the target.
        Raises ConfigError if the target's context is shorter than ``max_model_len``."""
        limit, context = self.max_model_len, target.max_positions
        if limit is not None and limit > context:
            raise ConfigError(
                f"max_model_len is {limit}, but {target.name} sees {context} tokens; lower it or "
                "leave it out"
            )
        return limit or context


def seeded_generator(device: torch.device, seed: int | None) -> torch.Generator:
    """The generator for requests without a seed; with ``seed`` None the system seeds it."""
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(os.urandom(7), "little") if seed is None else seed)
    return generator


def max_feature_tokens(max_batch_size: int) -> int:
    """For how many tokens drafters may keep features: the tokens of a step, and for the step and
    each sequence those that wait for the drafter's forward."""
    return SchedulerConfig.max_step_tokens + (1 + max_batch_size) * (1 + MAX_PENDING_FEATURES)


def _cache_memory(options: EngineOptions, target: CausalModel) -> int:
    """Bytes for caches: ``kv_cache_memory``, or a quarter of the device's free memory after
    subtracting what forwards and scoring need."""
    if options.kv_cache_memory is not None:
        return options.kv_cache_memory
    rows = SchedulerConfig.max_step_tokens
    scratch = scoring_bytes(target.vocab_size, rows) + target.backend.scratch_bytes(rows)
    return max(0, target.free_memory() - scratch) // 4


def state_slots(options: EngineOptions, target: CausalModel, draft_bytes: int = 0) -> int:
    """How many states of recurrent layers the cache holds, in at most half of its memory. A
    recurrent draft model, whose state takes ``draft_bytes``, gets as many. Raises CacheMemoryError
    if a full batch cannot run."""
    per_state = target.state_bytes + draft_bytes
    if not per_state:
        return 0
    batch, memory = options.max_batch_size, _cache_memory(options, target)
    slots = slots_within(memory, per_state, batch)
    if slots < (needed := batch * MIN_STATES_PER_SEQUENCE):
        raise CacheMemoryError(
            f"{batch} sequences need {needed} states of recurrent layers of "
            f"{per_state:,} bytes, in half of {memory:,}; lower max_batch_size or raise "
            "kv_cache_memory"
        )
    return slots


def slots_within(memory: int, per_state: int, batch: int) -> int:
    """How many states of ``per_state`` bytes a cache of ``memory`` bytes holds for a batch."""
    return min(batch * _STATES_PER_SEQUENCE, memory // 2 // per_state)


def cache_blocks(
    options: EngineOptions,
    target: CausalModel,
    draft_bytes: int = 0,
    feature_bytes: int = 0,
    state_bytes: int = 0,
) -> int:
    """How many blocks the cache has. A drafter's cache, with ``draft_bytes`` per token, has as many
    blocks, and the drafter may keep features of ``feature_bytes`` per token
    (draft/heads/features.py). ``state_bytes``: memory of all recurrent states.

    Without ``kv_cache_memory`` the cache holds at most a full batch of full contexts. Raises
    CacheMemoryError if not even two blocks fit.
    """
    per_token = bytes_per_token(target.cache_shapes, target.cache_dtype) + draft_bytes
    memory = options.kv_cache_memory
    affordable_bytes = _cache_memory(options, target) - state_bytes
    feature_tokens = max_feature_tokens(options.max_batch_size)
    blocks = blocks_within(affordable_bytes, per_token, feature_bytes, feature_tokens, BLOCK_SIZE)
    if memory is None:
        # One spare block per sequence, for drafts.
        full_context = -(-options.positions(target) // BLOCK_SIZE) + 1
        blocks = min(blocks, options.max_batch_size * full_context)
    if blocks < 2:
        per_block = BLOCK_SIZE * (per_token + feature_bytes)
        raise CacheMemoryError(
            f"the cache needs at least {2 * per_block:,} bytes, but has "
            f"{blocks * per_block if memory is None else affordable_bytes:,}; raise kv_cache_memory"
        )
    return blocks


def load_target(name: str, options: EngineOptions) -> CausalModel:
    """Load the target as the options say: in this process, with offloaded layers, or shared among
    several processes. Raises ModelLoadError, UnsupportedModelError, ConfigError."""
    loading: dict[str, Any] = {
        key: getattr(options, key) for key in ("dtype", "device", "backend", "quantize")
    }
    if options.offload is None and options.weights_memory is not None:
        raise ConfigError("weights_memory is for offload: give offload as well, or leave it out")
    if options.tensor_parallel == 1:
        target = CausalModel.load(
            name, **loading, offload=options.offload, weights_memory=options.weights_memory
        )
    elif options.offload is None:
        from paceline.parallel.shared import load_shared

        target = load_shared(name, options.tensor_parallel, **loading)
    else:
        raise ConfigError(
            f"offload={options.offload!r} and tensor_parallel={options.tensor_parallel}: weights "
            "are offloaded by one process or shared by several; leave one of them out"
        )
    target.quantize = options.quantize
    target.cache_dtype = cache_dtype(options.kv_cache_dtype, target.dtype)
    target.max_positions = options.positions(target)
    return target


def load_draft(
    draft: DraftLike | Sequence[DraftLike] | None,
    target: CausalModel,
    tokenizer: Tokenizer,
    settings: EngineSettings,
) -> PreparedDraft:
    """Load one drafter, or several that requests choose from, as the settings say."""
    how = {name: getattr(settings, f"draft_{name}") for name in ("quantize", "offload", "device")}
    prepared = prepare_all(draft, LoadContext(target, tokenizer, settings.dtype, **how))
    unused = ", ".join(f"draft_{name}={value}" for name, value in how.items() if value is not None)
    if not unused or any(map(_may_load_model, prepared.drafts)):
        return prepared
    note = f"{unused}: no effect, as no draft here is a model (model:PATH, tree:PATH)"
    return replace(prepared, notes=(*prepared.notes, note))


def _may_load_model(draft: str) -> bool:
    """Whether a draft is a model or not one of ours, which may load one; so may "none", as a
    command opens it before other drafts."""
    ours = {record.kind for record in RECORDS if record.argument_kind != "model"} - {NoDraft.kind}
    try:
        return not {member.kind for member in parse_draft(draft).members()} <= ours
    except ConfigError:  # the name of an object
        return True


def build_engine(
    target: CausalModel, prepared: PreparedDraft, options: EngineOptions, generator: torch.Generator
) -> Engine:
    """Build cache, drafter, scheduler, verifier and controller around a target. ``generator``
    samples for requests without a seed. Raises CacheMemoryError."""
    slots = state_slots(options, target, prepared.state_bytes)
    states = slots * (target.state_bytes + prepared.state_bytes)
    blocks = cache_blocks(options, target, prepared.cache_bytes, prepared.feature_bytes, states)
    cache = target.new_cache(blocks, BLOCK_SIZE, options.prefix_sharing, slots)
    device = target.device
    adapts = options.draft_length == "auto"

    @lru_cache(maxsize=1)
    def costs() -> TargetCosts:
        return options.costs or measure_costs(target, cache, options.max_batch_size)

    drafter = prepared.build(DraftContext(target, cache, generator, costs if adapts else None))
    predictions = Predictions(device)
    controller = options.controller
    members = {prepared.names[0] if prepared.names else drafter.name: drafter}
    if isinstance(drafter, Router):
        members = dict(zip(map(str, drafter.names), drafter.members, strict=True))
    if controller is None and adapts and not isinstance(drafter, NoDrafter):
        controller = adaptive_controller(members, predictions, costs(), options, device)
    elif controller is None:
        length = options.draft_length
        controller = FixedLength(length if isinstance(length, int) else 0)
    limits = SchedulerConfig(
        max_batch_size=options.max_batch_size,
        max_positions=min(options.positions(target), blocks * BLOCK_SIZE),
        max_scored_rows=max_scored_rows(target.vocab_size),
    )
    verifier = Verifier(options.rule, generator)
    parts = target, cache, drafter, verifier, Scheduler(limits, cache), controller
    strict = options.strict or os.environ.get("PACELINE_STRICT", "0") != "0"
    seeds = _draw_seed(options, drafter)
    return Engine(*parts, seeds, predictions, strict, options.log_decisions)


def _draw_seed(options: EngineOptions, drafter: Drafter) -> Callable[[], int] | None:
    """A function that makes seeds for sampled requests without one; None if they keep none. Seeds
    are made under the coupled rule, and for drafters whose seeded drafts cost far less."""
    cheaper = options.rule == "auto" and any(
        DrafterTraits.of(member).prefers_seeds for member in with_members(drafter)
    )
    if options.rule != "coupled" and not cheaper:
        return None
    seeds = seeded_generator(torch.device("cpu"), options.seed)
    return lambda: int(torch.randint(2**62, (), generator=seeds))


@torch.inference_mode()
def adaptive_controller(
    drafters: Mapping[str, Drafter],
    predictions: Predictions,
    costs: TargetCosts,
    options: EngineOptions,
    device: torch.device,
) -> AdaptiveController:
    """The adaptive controller over all drafters that requests may name, and their members."""
    cost = CostModel(costs)
    members: dict[str, tuple[Hashable, ...]] = {}
    lookups: dict[Hashable, LookupDrafter] = {}

    def add(name: str, member: Drafter) -> str:
        while name in cost.drafters:
            name += "'"
        seconds = CostCurve((1,), (0.0,))
        if member.passes(1):
            batches = sorted({1, costs.batches[-1]})
            seconds = measure(member.warm_up, batches, device, budget=_WARM_UP_SECONDS)
        kind = DRAFTERS.get(member.name, DraftSpec)
        longest = max(_MAX_DRAFT_LENGTH, kind.max_useful_length)
        cost.add(name, costs_of(member, longest, seconds, _COSTLESS))
        if isinstance(member, LookupDrafter) and member.drafts_before_choice:
            lookups[name] = member
        return name

    add(predictions.name, predictions)
    for name, drafter in drafters.items():
        if isinstance(drafter, HybridDrafter):
            drafter.names = tuple(add(member.name, member) for member in drafter.members)
            members[name] = (predictions.name, *drafter.names)
        else:
            members[name] = (predictions.name, add(name, drafter))
    return AdaptiveController(cost, members, lookups, fair=options.drafting == "fair")


def measure_costs(target: CausalModel, cache: PagedCache, max_batch_size: int) -> TargetCosts:
    """Measure target steps of one sequence, of ``max_batch_size``, and of as many sizes between as
    there is time for. The cache is unchanged afterwards."""
    start = time.perf_counter()
    powers = range(max_batch_size.bit_length(), 0, -1)
    between = (2**power for power in powers if 2**power < max_batch_size)
    counts = {
        size: [n for n in _MEASURED_TOKENS if n <= 2 or size * n <= _MAX_MEASURED_ROWS]
        for size in (1, max_batch_size, *between)
    }
    if target.offload is not None:  # a forward moves the same bytes for any number of rows
        counts = {size: [counts[size][0], counts[size][-1]] for size in (1, max_batch_size)}

    def begin(size: int) -> nullcontext[None] | None:
        late = time.perf_counter() - start > _MEASURING_SECONDS
        return None if late and size not in (1, max_batch_size) else nullcontext()

    return measure_target(
        target, cache, counts, rounds=1, budget=_SECONDS_PER_BATCH_SIZE, begin=begin
    )

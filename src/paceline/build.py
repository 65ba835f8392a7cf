"""Composition: names and numbers in, a running engine out. The one place that names drafters."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.config import DraftSpec
from paceline.core.tree import chain_parents
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NGramDrafter
from paceline.engine.controller import AdaptiveLength, Controller, FixedLength
from paceline.engine.costs import CostCurve, StepCosts, measure
from paceline.engine.engine import Engine
from paceline.engine.scheduler import Scheduler, SchedulerConfig
from paceline.errors import CacheMemoryError, ConfigError, ModelLoadError
from paceline.model.cache import Feed, PagedCache, bytes_per_token
from paceline.model.names import resolve
from paceline.model.target import CausalModel
from paceline.model.vocabulary import check_same_vocabulary
from paceline.verify.rule import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BLOCK_SIZE = 16
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


@dataclass(frozen=True)
class DraftContext:
    """What a drafter may be built from."""

    spec: DraftSpec
    target: CausalModel
    generator: torch.Generator
    draft_model: CausalModel | None
    num_blocks: int
    prefix_sharing: bool = True


def _ngram(context: DraftContext) -> Drafter:
    spec = context.spec
    spec.check_options(("min", "max", "length"))
    return NGramDrafter(
        context.target.device,
        spec.integer("min", 2),
        spec.integer("max", 4),
        spec.integer("length", 8),
    )


def _model(context: DraftContext) -> Drafter:
    context.spec.check_options(("branching",))
    draft = context.draft_model
    assert draft is not None
    cache = new_cache(draft, context.num_blocks, context.prefix_sharing)
    branching = context.spec.branching()
    if context.spec.kind == "tree":
        branching = branching or (2, 2, 1)
    return ModelDrafter(draft, cache, context.target.vocab_size, context.generator, branching)


def _none(context: DraftContext) -> Drafter:
    return NoDrafter(context.target.device)


# The first word of a draft spec -> how to build it. A new drafter is one file and one line here.
DRAFTERS: dict[str, Callable[[DraftContext], Drafter]] = {
    "none": _none,
    "ngram": _ngram,
    "model": _model,
    "tree": _model,
}


def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a model's folder. Raises ModelLoadError if there is none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(name))
    except (OSError, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelLoadError(
            f"no tokenizer in {name}: {reason}; put tokenizer.json beside the weights"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(
            f"the tokenizer of {name} is not a fast one (tokenizer.json); "
            "convert it with transformers' convert_slow_tokenizer and save it there"
        )
    return tokenizer


def seeded_generator(device: torch.device, seed: int | None) -> torch.Generator:
    """Randomness of requests without a seed of their own; None takes it from the system."""
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(os.urandom(7), "little") if seed is None else seed)
    return generator


def new_cache(model: CausalModel, num_blocks: int, share: bool = True) -> PagedCache:
    return PagedCache(model.cache_shapes, num_blocks, BLOCK_SIZE, model.dtype, model.device, share)


def load_draft(
    spec: DraftSpec, target: CausalModel, tokenizer: PreTrainedTokenizerFast, dtype: str
) -> CausalModel | None:
    """The draft model of a spec, if it has one, with its vocabulary compared to the target's.

    Raises VocabularyMismatchError, and what CausalModel.load raises.
    """
    if spec.kind not in ("model", "tree"):
        return None
    if not spec.argument:
        raise ConfigError(f"draft {spec.kind!r} needs a model: {spec.kind}:PATH")
    draft = CausalModel.load(spec.argument, dtype=dtype, device=str(target.device))
    folder = Path(resolve(spec.argument))
    own = tokenizer
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        own = load_tokenizer(spec.argument)
    check_same_vocabulary(tokenizer, own, target, draft)
    return draft


def cache_blocks(options: EngineOptions, target: CausalModel, draft: CausalModel | None) -> int:
    """Blocks of the cache, the same number for target and draft.

    By default enough for a full batch of full contexts, but at most a quarter of the free memory
    of the device. Raises CacheMemoryError if not even a few blocks fit.
    """
    models = [target] if draft is None else [target, draft]
    per_block = BLOCK_SIZE * sum(bytes_per_token(m.cache_shapes, m.dtype) for m in models)
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


def build_engine(context: DraftContext, options: EngineOptions) -> Engine:
    """Cache, drafter, scheduler, verifier and controller around a target."""
    target = context.target
    drafter = DRAFTERS[context.spec.kind](context)
    cache = new_cache(target, context.num_blocks, context.prefix_sharing)
    controller: Controller
    if options.draft_length == "auto" and not isinstance(drafter, NoDrafter):
        costs = measure_costs(target, cache, drafter, options)
        controller = AdaptiveLength(costs, options.max_draft_length, drafter.max_nodes)
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
    verifier = Verifier(options.rule, context.generator)
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

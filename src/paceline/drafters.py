"""The table of drafters: from a spec such as ``ngram:min=2`` to a drafter.

A drafter is prepared before the cache is sized (its weights and its own cache take memory) and
built after. A new drafter is one file in ``draft/`` and one line in ``DRAFTERS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.config import DraftSpec
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NGramDrafter
from paceline.draft.policy import Policy
from paceline.draft.shape import Shape
from paceline.errors import ConfigError, ModelLoadError
from paceline.model.cache import LayerShape, PagedCache, bytes_per_token
from paceline.model.names import resolve
from paceline.model.target import CausalModel
from paceline.model.vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Loading:
    """What a drafter is prepared from: the target, its tokenizer, and the wished dtype."""

    target: CausalModel
    tokenizer: PreTrainedTokenizerFast
    dtype: str


@dataclass(frozen=True)
class DraftContext:
    """What a prepared drafter is built from. ``cache`` is the target's own."""

    target: CausalModel
    cache: PagedCache
    generator: torch.Generator

    def new_cache(self, shapes: list[LayerShape], dtype: torch.dtype) -> PagedCache:
        """A cache for a drafter's own layers, of as many tokens as the target's."""
        own = self.cache
        return PagedCache(shapes, own.num_blocks, own.block_size, dtype, own.device, own.shares)


@dataclass(frozen=True)
class Prepared:
    """A drafter whose weights are loaded. ``cache_bytes`` is cache memory per token."""

    build: Callable[[DraftContext], Drafter]
    cache_bytes: int = 0


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


def _none(spec: DraftSpec, loading: Loading) -> Prepared:
    return Prepared(lambda context: NoDrafter(context.target.device))


def _ngram(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options(("min", "max", "length", "candidates", "source"))
    numbers = {
        "shortest": spec.integer("min", 1),
        "longest": spec.integer("max", 4),
        "length": spec.integer("length", 8),
        "candidates": spec.integer("candidates", 3),
    }
    source = spec.options.get("source", "both")
    return Prepared(lambda context: NGramDrafter(context.target.device, **numbers, source=source))


def _model(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options(POLICY_OPTIONS)
    policy = tree_policy(spec)
    model = load_draft_model(spec, loading)

    def build(context: DraftContext) -> Drafter:
        cache = context.new_cache(model.cache_shapes, model.dtype)
        vocab = context.target.vocab_size
        return ModelDrafter(model, cache, vocab, context.generator, policy, spec.kind)

    return Prepared(build, bytes_per_token(model.cache_shapes, model.dtype))


POLICY_OPTIONS = ("branching", "nodes", "width")


def tree_policy(spec: DraftSpec, nodes: int = 0) -> Policy:
    """``branching=2x2x1``: a static tree; ``nodes=16,width=4``: best-first; neither: a chain.

    ``nodes`` is the default of the option. Raises ConfigError.
    """
    branching = spec.branching()
    nodes = spec.integer("nodes", 0 if branching else nodes)
    width = spec.integer("width", 4)
    if spec.kind == "tree" and not branching and not nodes:
        branching = (2, 2, 1)
    if nodes < 0 or width < 1:
        raise ConfigError(f"draft {spec.kind!r}: use nodes >= 0 and width >= 1")
    if branching and "nodes" in spec.options:
        raise ConfigError(f"draft {spec.kind!r}: give either branching or nodes, not both")
    if branching:
        return Policy(Shape.branching(branching))
    return Policy(nodes=nodes, width=width)


# The first word of a draft spec -> how to prepare it.
DRAFTERS: dict[str, Callable[[DraftSpec, Loading], Prepared]] = {
    "none": _none,
    "ngram": _ngram,
    "model": _model,
    "tree": _model,
}


def prepare(spec: DraftSpec, loading: Loading) -> Prepared:
    """Load what a drafter needs. Raises what its file, its weights or its options give cause to."""
    return DRAFTERS[spec.kind](spec, loading)


def load_draft_model(spec: DraftSpec, loading: Loading) -> CausalModel:
    """The draft model that a spec names, with its vocabulary compared to the target's.

    Raises ConfigError, VocabularyMismatchError, and what CausalModel.load raises.
    """
    if not spec.argument:
        raise ConfigError(f"draft {spec.kind!r} needs a model: {spec.kind}:PATH")
    target, tokenizer = loading.target, loading.tokenizer
    draft = CausalModel.load(spec.argument, dtype=loading.dtype, device=str(target.device))
    folder = Path(resolve(spec.argument))
    own = tokenizer
    if not folder.is_dir() or (folder / "tokenizer.json").is_file():
        own = load_tokenizer(spec.argument)
    check_same_vocabulary(tokenizer, own, target, draft)
    return draft

"""The table of drafters: from a spec such as ``ngram:min=2`` to a drafter.

A drafter is prepared before the cache is sized (its weights and its own cache take memory) and
built after. A new drafter is one file in ``draft/`` and one line in ``DRAFTERS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.config import DraftSpec
from paceline.draft.base import Drafter, NoDrafter
from paceline.draft.heads.eagle import EagleDrafter
from paceline.draft.heads.eagle_format import load_eagle
from paceline.draft.heads.eagle_lean import quicken
from paceline.draft.heads.medusa import MedusaDrafter, shapes_of
from paceline.draft.heads.medusa_format import load_medusa
from paceline.draft.lookahead import LookaheadDrafter
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NGramDrafter
from paceline.draft.recycling import RecyclingDrafter
from paceline.draft.router import Router
from paceline.draft.selfspec import SelfDrafter, SwiftDrafter, parse_layers
from paceline.draft.suffix import SuffixDrafter, SuffixOptions
from paceline.draft.swift import SkipSearch, skippable
from paceline.draft.translated import StringDrafter
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.shape import Shape
from paceline.draft.vocabulary.matching import Match, match_vocabularies
from paceline.draft.vocabulary.shared import Intersection, SharedVocabulary, Vocabulary
from paceline.errors import ConfigError
from paceline.model.gguf import gguf_file
from paceline.model.loading import load_tokenizer as load_tokenizer
from paceline.model.names import resolve
from paceline.model.paged.cache import LayerShape, PagedCache, bytes_per_token
from paceline.model.target import CausalModel
from paceline.model.view import LayerView
from paceline.pace.hybrid import Hybrid

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BLOCK_SIZE = 16
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Loading:
    """What a drafter is prepared from: the target, its tokenizer, and the dtype asked for."""

    target: CausalModel
    tokenizer: PreTrainedTokenizerFast
    dtype: str


@dataclass(frozen=True)
class DraftContext:
    """What a prepared drafter is built from. ``cache`` is the target's own."""

    target: CausalModel
    cache: PagedCache
    generator: torch.Generator

    def new_cache(
        self, shapes: list[LayerShape], dtype: torch.dtype, share: bool = True
    ) -> PagedCache:
        """A cache for a drafter's own layers, of as many tokens as the target's.

        ``share``: requests that begin alike share blocks, if they do in the target's.
        """
        own, share = self.cache, self.cache.shares and share
        return PagedCache(shapes, own.num_blocks, own.block_size, dtype, own.device, share)


@dataclass(frozen=True)
class Prepared:
    """A drafter whose weights are loaded. ``cache_bytes`` is cache memory per token,
    ``feature_bytes`` that of one token's features, should it have to keep them for a while.

    ``names`` are those by which requests choose it, or one of several; the first is the default.
    """

    build: Callable[[DraftContext], Drafter]
    cache_bytes: int = 0
    names: tuple[str, ...] = ()
    feature_bytes: int = 0


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


def _suffix(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options(
        ("max_depth", "factor", "offset", "min_prob", "nodes", "max_tokens", "global")
    )
    default = SuffixOptions()
    shared = spec.options.get("global", "on")
    if shared not in ("on", "off"):
        raise ConfigError(f"draft 'suffix': global={shared!r} is neither on nor off")
    max_tokens = spec.integer("max_tokens", default.max_tokens)
    options = SuffixOptions(
        max_depth=spec.integer("max_depth", default.max_depth),
        factor=spec.number("factor", default.factor),
        offset=spec.number("offset", default.offset),
        min_prob=spec.number("min_prob", default.min_prob),
        nodes=spec.integer("nodes", 0) if "nodes" in spec.options else None,
        max_tokens=max_tokens if shared == "on" else 0,
    )
    target = loading.target
    drafter = SuffixDrafter(target.device, target.vocab_size, options, spec.argument)
    return Prepared(lambda context: drafter)


def _lookahead(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options(("window", "ngram", "candidates"))
    window, ngram = spec.integer("window", 5), spec.integer("ngram", 3)
    drafter = LookaheadDrafter(loading.target.device, window, ngram, spec.integer("candidates", 3))
    return Prepared(lambda context: drafter)


def _recycling(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options(("k", "nodes", "share"))
    k, nodes = spec.integer("k", 8), spec.integer("nodes", 12)
    share = spec.options.get("share", "on")
    if share not in ("on", "off"):
        raise ConfigError(f"draft 'recycling': share={share!r} is neither on nor off")
    target = loading.target
    drafter = RecyclingDrafter(target.device, target.vocab_size, k, nodes, share == "on")
    return Prepared(lambda context: drafter)


def _model(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options((*POLICY_OPTIONS, "vocab"))
    policy = tree_policy(spec)
    model, match = load_draft_model(spec, loading)
    widths = loading.target.vocab_size, model.vocab_size

    def build(context: DraftContext) -> Drafter:
        texts = match is not None and match.method == "string"
        # The end of a re-tokenised text may change, and a shared block must not.
        cache = context.new_cache(model.cache_shapes, model.dtype, share=not texts)
        vocabulary: Vocabulary = SharedVocabulary(*widths)
        if match is not None and texts:
            vocabulary = SharedVocabulary(model.vocab_size, model.vocab_size)
        elif match is not None:
            ours, theirs, share = match.target, match.draft, match.share
            vocabulary = Intersection(ours, theirs, match.pairs, widths, model.device, share)
        drafter = ModelDrafter(model, cache, vocabulary, context.generator, policy, spec.kind)
        if match is None or not texts:
            return drafter
        return StringDrafter(drafter, match.target, match.draft, match.pairs, match.share)

    return Prepared(build, bytes_per_token(model.cache_shapes, model.dtype))


def _early_exit(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options(("layers", *POLICY_OPTIONS))
    policy = tree_policy(spec)
    view = LayerView(loading.target, range(exit_layers(spec, loading.target.num_layers)))
    return Prepared(lambda c: SelfDrafter(view, c.cache, policy, c.generator, spec.kind))


def exit_layers(spec: DraftSpec, total: int) -> int:
    """How many of the target's ``total`` layers an early exit runs. Raises ConfigError."""
    layers = spec.integer("layers", max(1, round(total / 3)))
    if not 0 < layers < total:
        raise ConfigError(
            f"draft 'early_exit': layers={layers}, but the target has {total}; "
            "use at least 1 and fewer than all"
        )
    return layers


def _layer_skip(spec: DraftSpec, loading: Loading) -> Prepared:
    """A fixed set with ``skip``, else one that is searched for (SWIFT)."""
    spec.check_options(("skip", *SWIFT_OPTIONS, *POLICY_OPTIONS))
    policy, total = tree_policy(spec), loading.target.num_layers
    if "skip" in spec.options:
        fixed = sorted(set(SWIFT_OPTIONS) & set(spec.options))
        if fixed:
            raise ConfigError(f"draft 'layer_skip': skip fixes the set; leave out {fixed[0]}")
        skipped = parse_layers(spec.options["skip"], total)
        view = LayerView(loading.target, [n for n in range(total) if n not in skipped])
        return Prepared(lambda c: SelfDrafter(view, c.cache, policy, c.generator, spec.kind))
    choice, tries = skippable(total), spec.integer("tries", 160)
    window, interval = spec.integer("window", 32), spec.integer("interval", 32)
    ratio = spec.number("ratio", 0.45)
    if not choice:
        raise ConfigError("draft 'layer_skip': the target has one layer, which it needs")
    if not 0 < ratio < 1 or tries < 0 or window < 1 or interval < 1:
        raise ConfigError(
            "draft 'layer_skip': use a ratio between 0 and 1, tries >= 0, window and interval >= 1"
        )
    count = min(len(choice), max(1, round(ratio * total)))
    whole = LayerView(loading.target, range(total))

    def build(context: DraftContext) -> Drafter:
        search = SkipSearch(choice, count, tries)
        cache, generator = context.cache, context.generator
        return SwiftDrafter(whole, cache, policy, generator, search, window, interval, spec.kind)

    return Prepared(build)


SWIFT_OPTIONS = ("ratio", "window", "interval", "tries")
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


def _medusa(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options(("nodes", "tree"))
    if not spec.argument:
        raise ConfigError("draft 'medusa' needs heads: medusa:PATH")
    target = loading.target
    heads = load_medusa(spec.argument, target.hidden_size, target.vocab_size, target.num_layers).to(
        device=target.device, dtype=target.dtype
    )
    config = heads.config
    tree = spec.options.get("tree", "auto")
    shapes = shapes_of(config.heads, spec.integer("nodes", 8), tree, config.accuracy)
    return Prepared(lambda context: MedusaDrafter(heads, context.target, shapes, context.generator))


def _eagle(spec: DraftSpec, loading: Loading) -> Prepared:
    spec.check_options((*POLICY_OPTIONS, "layers"))
    # Verifying about eight tokens costs a processor what one costs; a GPU has more room.
    on_gpu = loading.target.device.type == "cuda"
    policy = tree_policy(spec, 0 if spec.kind == "eagle" else (32 if on_gpu else 8))
    if not spec.argument:
        raise ConfigError(f"draft {spec.kind!r} needs a head: {spec.kind}:PATH")
    target = loading.target
    head = load_eagle(
        spec.argument,
        target,
        version=3 if spec.kind == "eagle3" else 1,
        feature_layers=feature_layers(spec),
        target_head=target.hf.get_output_embeddings(),
    )
    head = head.to(target.device, target.dtype).eval().requires_grad_(False)
    embed = head.embed_tokens or target.hf.get_input_embeddings()
    quick = quicken(head, target.max_positions)

    def build(context: DraftContext) -> Drafter:
        cache = context.new_cache([head.cache_shape], target.dtype)
        return EagleDrafter(quick, cache, embed, policy, context.generator, spec.kind)

    kept = len(head.config.feature_layers) * target.hidden_size * target.dtype.itemsize
    cached = bytes_per_token([head.cache_shape], target.dtype)
    return Prepared(build, cached, feature_bytes=kept)


def feature_layers(spec: DraftSpec) -> tuple[int, ...] | None:
    """``layers=2x16x29``: layers whose inputs a head reads, in the place of its config's."""
    value = spec.options.get("layers")
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split("x"))
    except ValueError:
        raise ConfigError(
            f"draft {spec.kind!r}: layers={value!r} is not like 2x16x29 (layers of the target)"
        ) from None


def _hybrid(spec: DraftSpec, loading: Loading) -> Prepared:
    members = [prepare(member, loading) for member in spec.members(tuple(DRAFTERS))]
    return Prepared(
        lambda context: Hybrid([m.build(context) for m in members], context.target.device),
        sum(member.cache_bytes for member in members),
        feature_bytes=sum(member.feature_bytes for member in members),
    )


# The first word of a draft spec -> how to prepare it.
DRAFTERS: dict[str, Callable[[DraftSpec, Loading], Prepared]] = {
    "eagle": _eagle,
    "eagle2": _eagle,
    "eagle3": _eagle,
    "none": _none,
    "hybrid": _hybrid,
    "early_exit": _early_exit,
    "layer_skip": _layer_skip,
    "medusa": _medusa,
    "ngram": _ngram,
    "lookahead": _lookahead,
    "recycling": _recycling,
    "suffix": _suffix,
    "model": _model,
    "tree": _model,
}


def prepare(spec: DraftSpec, loading: Loading) -> Prepared:
    """Load what a drafter needs. Raises what its file, its weights or its options give cause to."""
    return replace(DRAFTERS[spec.kind](spec, loading), names=(spec.kind,))


def prepare_all(drafts: str | Sequence[str] | None, loading: Loading) -> Prepared:
    """Prepare one spec, or several of which every request may choose one (draft/router.py).

    They are called by their kinds; a second of one kind is KIND-2. Raises what ``prepare`` does.
    """
    texts = [drafts] if drafts is None or isinstance(drafts, str) else list(drafts)
    specs = [DraftSpec.parse(text, tuple(DRAFTERS)) for text in texts] or [DraftSpec("none")]
    if len(specs) == 1:
        return prepare(specs[0], loading)
    parts: dict[str, Prepared] = {}
    for spec in specs:
        number = 1 + sum(name.partition("-")[0] == spec.kind for name in parts)
        name = spec.kind if number == 1 else f"{spec.kind}-{number}"
        parts[name] = prepare(spec, loading)

    def build(context: DraftContext) -> Drafter:
        members = {name: part.build(context) for name, part in parts.items()}
        return Router(members, context.target.device)

    total = sum(part.cache_bytes for part in parts.values())
    kept = sum(part.feature_bytes for part in parts.values())
    return Prepared(build, total, tuple(parts), kept)


def load_draft_model(spec: DraftSpec, loading: Loading) -> tuple[CausalModel, Match | None]:
    """The draft model that a spec names, and how its vocabulary is used if it is another one.

    Raises ConfigError, VocabularyMismatchError, and what CausalModel.load raises.
    """
    if not spec.argument:
        raise ConfigError(f"draft {spec.kind!r} needs a model: {spec.kind}:PATH")
    target, tokenizer = loading.target, loading.tokenizer
    place = str(target.device)
    draft = CausalModel.load(
        spec.argument, loading.dtype, place, check_values=True, backend=target.asked
    )
    folder = Path(resolve(spec.argument))
    own = tokenizer
    if (
        not folder.is_dir()
        or gguf_file(str(folder))
        or any((folder / name).is_file() for name in _TOKENIZER_FILES)
    ):
        own = load_tokenizer(spec.argument)
    method = spec.options.get("vocab", "auto")
    return draft, match_vocabularies(target, draft, tokenizer, own, method)

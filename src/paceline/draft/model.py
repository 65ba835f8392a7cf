"""Drafting with a small model: chains, static trees, or dynamic trees.

Leviathan et al. 2023 and Chen et al. 2023 (chains), SpecInfer (Miao et al. 2024, trees). The draft
model has its own paged cache. One forward drafts one level for the whole batch::

    level 1: tokens the draft has not seen (the last commit's; the prompt at first)
    level 2: the nodes of level 1, each attending to its ancestors   ... and so on
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from paceline.core.stages import info
from paceline.draft.base import Drafter
from paceline.draft.heads.checkpoint import MASK_OPTIONS, refuse_head
from paceline.draft.model_drafter import ModelDrafter, ParallelDrafter, StringDrafter
from paceline.draft.spec import DraftContext, LoadContext, PreparedDraft, TreeSpec, option
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.shape import Shape
from paceline.draft.vocabulary import Intersection, Match, SharedVocabulary, match_vocabularies
from paceline.model.gguf import gguf_file
from paceline.model.names import model_path
from paceline.model.paged.cache import bytes_per_token
from paceline.model.quantised.weights import BITS
from paceline.model.target import CausalModel
from paceline.model.tokenizer import TOKENIZER_FILES, load_tokenizer

_Model = TypeVar("_Model", bound="DraftModel")


# Dynamic trees end where a level is accepted with less than this chance. The limit is higher than a
# head's because a pass of a model costs more.
_MIN_LEVEL_PROB = 0.3


@dataclass(frozen=True)
class DraftModel(TreeSpec):
    """A model by folder, built-in or hub name. ``vocab``: how a vocabulary other than the target's
    is translated: "intersection", "string", or "auto", which decides by what the two share.
    ``quantize``: "int8" or "int4" instead of the setting for all drafts. ``parallel``: a model that
    was trained for it (its config names a ``pard_token``) drafts all its tokens in one pass."""

    kind = "model"
    page = "draft_model.md"
    argument_kind = "model"
    weights = "draft"
    examples: ClassVar[tuple[str, ...]] = (
        "model:{draft}",
        "model:{target}",
        "model:{draft},branching=3x2x1",
        "model:{draft},branching=4",
        "model:{draft},nodes=20,width=5",
    )

    path: str = option(needs="a model")
    _: KW_ONLY
    vocab: str = option("auto", choices=("auto", "intersection", "string"))
    quantize: str | None = option(None, choices=tuple(BITS))
    parallel: bool = True

    def precisions(self: _Model) -> dict[str, _Model]:
        if self.quantize is not None or self.shape() is not None:
            return {}
        return {name: replace(self, nodes=0, quantize=name) for name in BITS}

    def prepare(self, loading: LoadContext) -> PreparedDraft:
        model, match = self._load(loading)
        mask = self.mask_of(model.hf.config)
        if mask is not None and not 0 <= mask < model.vocab_size:
            raise self.refuse(
                f"the config.json of {self.path} has {mask} as the token for parallel drafting, "
                f"which is none of {model.vocab_size}; copy the file again or add parallel=off"
            )

        def build(context: DraftContext) -> Drafter:
            placement = model.device, model.rope_switch
            cache = context.new_cache(model.cache_shapes, model.dtype, *placement)
            cache.states = model.new_states()
            settings = self.growth_settings(context, cache, _MIN_LEVEL_PROB if self.nodes else 0.0)
            device = context.target.device
            widths = loading.target.vocab_size, model.vocab_size
            if match is not None and match.method == "string":
                return StringDrafter(match, model, settings, device)
            vocabulary = SharedVocabulary(*widths)
            if match is not None:
                vocabulary = Intersection(match, widths, model.device)
            if mask is None:
                return ModelDrafter(model, settings, vocabulary, device)
            return ParallelDrafter(mask, model, settings, vocabulary, device)

        if match is not None and match.method == "string" and model.state_bytes:
            raise self.refuse(
                "its recurrent layers cannot go back to where a text is tokenised otherwise; "
                "take a draft with the target's vocabulary"
            )
        cached = bytes_per_token(model.cache_shapes, model.dtype)
        return PreparedDraft(build, cached, state_bytes=model.state_bytes)

    def mask_of(self, config: Any) -> int | None:
        """The mask token of a model that drafts in one pass; None for one that drafts token by
        token. ``config``: the model's, of transformers."""
        names = MASK_OPTIONS if self.parallel else ()
        return next((mask for n in names if (mask := getattr(config, n, None)) is not None), None)

    def _load(self, loading: LoadContext) -> tuple[CausalModel, Match | None]:
        """The model, and how its vocabulary is translated (None: it is the target's)."""
        target, tokenizer = loading.target, loading.tokenizer
        refuse_head(self.path)
        draft = CausalModel.load(
            self.path,
            loading.dtype,
            loading.device or str(target.device),
            check_values=True,
            quantize=self.quantize or loading.quantize,
            backend=target.requested_backend,
            offload=loading.offload,
        )
        if draft.load_note:
            info(f"the draft: {draft.load_note}")
        folder = Path(model_path(self.path))
        has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
        has_tokenizer = has_tokenizer or not folder.is_dir() or bool(gguf_file(str(folder)))
        draft_tokenizer = load_tokenizer(self.path) if has_tokenizer else tokenizer
        return draft, match_vocabularies(target, draft, tokenizer, draft_tokenizer, self.vocab)


@dataclass(frozen=True)
class DraftTree(DraftModel):
    """Static trees of 2x2x1 by default."""

    kind = "tree"
    examples: ClassVar[tuple[str, ...]] = ("tree:{draft}", "tree:{draft},nodes=6,width=3")

    def policy(self, nodes: int = 0) -> Policy:
        if not self.branching and not self.nodes:
            return Policy(Shape.branching((2, 2, 1)))
        return super().policy(nodes)

    def shape(self) -> str:
        shape = super().shape()
        return "tree" if shape in (None, "chain") else str(shape)

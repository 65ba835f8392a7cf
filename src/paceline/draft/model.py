"""Drafting with a small model: chains, static trees, or dynamic trees.

Leviathan et al. 2023 and Chen et al. 2023 (chains), SpecInfer (Miao et al. 2024, trees). The draft
model has its own paged cache. One forward drafts one level for the whole batch::

    level 1: tokens the draft has not seen (the last commit's; the prompt at first)
    level 2: the nodes of level 1, each attending to its ancestors   ... and so on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice, Span
from paceline.core.stages import info
from paceline.core.tree import TokenTree
from paceline.draft.base import Drafter
from paceline.draft.heads.checkpoint import MASK_OPTIONS, refuse_head
from paceline.draft.spec import (
    DraftContext,
    DraftSpec,
    LoadContext,
    PreparedDraft,
    TreeSpec,
    option,
)
from paceline.draft.trees.grow import GrowingTree, Logits
from paceline.draft.trees.levels import (
    CachedRows,
    CachingDrafter,
    GrowthSettings,
    OnePassDrafter,
)
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.shape import Shape
from paceline.draft.vocabulary import (
    Intersection,
    Match,
    SharedVocabulary,
    match_vocabularies,
)
from paceline.model.backends.base import GrownTree, TreeGrower
from paceline.model.gguf import gguf_file
from paceline.model.names import model_path
from paceline.model.paged.cache import bytes_per_token, path_moves
from paceline.model.quantised.weights import BITS
from paceline.model.target import CausalModel
from paceline.model.tokenizer import TOKENIZER_FILES, load_tokenizer

# Dynamic trees end where a level is accepted with less than this chance. The limit is higher than a
# head's because a pass of a model costs more.
_MIN_LEVEL_PROB = 0.3


@dataclass(frozen=True)
class DraftModel(TreeSpec):
    """A model by folder, built-in or hub name. If its vocabulary is not the target's, it drafts the
    tokens that both have.
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
    quantize: str | None = option(None, choices=tuple(BITS))
    parallel: bool = True

    def precisions(self) -> dict[str, DraftSpec]:
        if self.quantize is not None or self.is_shaped():
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
            vocabulary = SharedVocabulary(*widths)
            if match is not None:
                vocabulary = Intersection(match, widths, model.device)
            if mask is None:
                return ModelDrafter(model, settings, vocabulary, device)
            return ParallelDrafter(mask, model, settings, vocabulary, device)

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
        return draft, match_vocabularies(target, draft, tokenizer, draft_tokenizer)


@dataclass(frozen=True)
class DraftTree(DraftModel):
    """Static trees of 2x2x1 by default."""

    kind = "tree"
    examples: ClassVar[tuple[str, ...]] = ("tree:{draft}", "tree:{draft},nodes=6,width=3")

    def policy(self, nodes: int = 0) -> Policy:
        if not self.branching and not self.nodes:
            return Policy(Shape.branching((2, 2, 1)))
        return super().policy(nodes)

    def is_shaped(self) -> bool:
        return True


@dataclass
class TextRows(CachedRows):
    """The draft model's rows of a sequence. ``keys``: the first ``translated`` of the sequence's
    tokens, in the draft's vocabulary. Node i of the last proposal is in row ``cached + slots[i]``,
    or has no row if ``slots[i]`` is -1."""

    translated: int = 0
    slots: tuple[int, ...] = ()


class ModelDrafter(CachingDrafter[TextRows]):
    """Drafts with a model. ``vocabulary`` translates between the target's ids and the draft's."""

    _keeps_rows = True  # whether the cache rows of accepted nodes are kept

    def __init__(
        self,
        model: CausalModel,
        settings: GrowthSettings,
        vocabulary: SharedVocabulary,
        deliver_to: torch.device,
    ) -> None:
        """``deliver_to``: the target's device."""
        super().__init__(settings, model.max_positions)
        self._deliver_to = deliver_to
        self._empty = TokenTree.empty(deliver_to)
        self.model = model
        self._vocabulary = vocabulary
        self._same_ids = type(vocabulary) is SharedVocabulary
        self._follows_grammar = self._follows_grammar and self._same_ids

    @property
    def vocabulary(self) -> str | None:
        """How the draft's vocabulary is translated, for users; None if it is the target's."""
        return self._vocabulary.description

    @property
    def runs_torch(self) -> bool:
        return self.model.backend.runs_torch

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        if not any(item.draft_length or not item.decodes for item in plan.slices):
            return [self._empty] * len(plan.slices)
        return super().propose(plan)

    @property
    def tree_grower(self) -> TreeGrower | None:
        return self.model.backend.tree_grower if self._same_ids else None

    def _run_model(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> torch.Tensor:
        return self.model(self.cache.batch_of(spans), self.cache).logits

    def _as_target_logits(self, logits: torch.Tensor) -> Logits:
        return self._vocabulary.logits(logits)

    def _run_frontiers(self, trees: list[GrowingTree]) -> Logits:
        nodes = self._vocabulary.nodes
        return self._run_spans([tree.frontier_span(nodes(tree.frontier)) for tree in trees], trees)

    def _warm_up_logits(self, trees: Sequence[GrowingTree]) -> Logits:
        size, model = (len(trees), self.model.vocab_size), self.model
        return self._as_target_logits(torch.zeros(size, dtype=model.dtype, device=model.device))

    def _to_proposal(self, item: Slice, grown: GrownTree) -> TokenTree:
        self._rows[item.seq.seq_id].slots = grown.slots if self._keeps_rows else ()
        return grown.tree.on(self._deliver_to)

    def _context_span(self, item: Slice) -> Span | None:
        """The committed tokens that the draft has not seen, if they are needed and fit."""
        seq = item.seq
        rows = self._rows.get_or_make(seq, lambda _: TextRows())
        self._append(seq.seq_id, seq.tokens[rows.translated :])
        drafts = item.decodes and self._policy.depth(item.draft_length) > 0
        beyond = len(rows.keys) + item.draft_length >= self.model.max_positions
        # Prompt chunks run at once; the tokens of steps without a draft wait for the next draft.
        if beyond or (item.decodes and not drafts):
            return None
        # In another vocabulary a prompt has more or fewer tokens than in the target's.
        known = len(seq.tokens) if item.decodes else seq.cached + item.scheduled
        end = len(rows.keys) * known // len(seq.tokens)
        if seq.seq_id not in self.cache:
            rows.cached = self.cache.admit(seq.seq_id, rows.keys)
        if rows.cached >= end:
            return None  # the draft's prefix cache already has this prompt chunk
        rows.slots = ()
        nodes = self._rows_for_nodes(item.draft_length) if item.decodes else 0
        return self._next_rows(seq.seq_id, rows.keys[rows.cached : end], nodes, item.decodes)

    def _append(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Translate the sequence's next tokens and append them to its ``keys``."""
        rows = self._rows[seq_id]
        rows.keys += self._vocabulary.context(tokens)
        rows.translated += len(tokens)

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Keep the cache rows of accepted nodes that were expanded, free the others."""
        super().observe(commits, out)
        moves: list[tuple[int, int, int]] = []
        kept: list[tuple[Commit, int]] = []
        for commit in commits:
            rows = self._rows.get(commit.seq_id)
            if rows is None or not rows.uncommitted or commit.seq_id not in self.cache:
                continue
            # Nodes without children were not expanded and have no rows: their tokens stay pending.
            slots = [rows.slots[node] for node in commit.path if node < len(rows.slots)]
            expanded = [slot for slot in slots if slot >= 0]
            moves.extend(path_moves(commit.seq_id, rows.cached, expanded))
            kept.append((commit, len(expanded)))
        self.cache.move(moves)
        for commit, count in kept:
            rows = self._rows[commit.seq_id]
            rows.cached += count
            rows.slots = ()
            self._append(commit.seq_id, commit.tokens)
            self._commit_rows(commit.seq_id)


class ParallelDrafter(OnePassDrafter, ModelDrafter):
    """Drafts all its tokens in one pass with a model that was trained for it."""

    _keeps_rows = False  # rows of masks

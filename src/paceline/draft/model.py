"""Drafting with a small model: chains, static trees, or dynamic trees.

Leviathan et al. 2023 and Chen et al. 2023 (chains), SpecInfer (Miao et al. 2024, trees). The draft
model has its own paged cache. One forward drafts one level for the whole batch::

    level 1: tokens the draft has not seen (the last commit's; the prompt at first)
    level 2: the nodes of level 1, each attending to its ancestors   ... and so on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import ClassVar, TypeVar

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice, Span
from paceline.core.stages import info
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree, children_of, paths_of
from paceline.draft.base import Drafter, States
from paceline.draft.spec import DraftContext, Loading, Prepared, TreeSpec, option
from paceline.draft.trees.grow import Growing, level_span
from paceline.draft.trees.levels import LevelDrafter, Levels
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.shape import Shape, merge
from paceline.draft.vocabulary.shared import (
    Intersection,
    Match,
    SharedVocabulary,
    match_vocabularies,
)
from paceline.draft.vocabulary.strings import Shadow
from paceline.model.backends.base import GrownTree, Growth
from paceline.model.gguf import gguf_file
from paceline.model.hub import fetched
from paceline.model.loading import load_tokenizer
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import bytes_per_token, path_moves
from paceline.model.quantised.weights import BITS
from paceline.model.target import CausalModel

_Model = TypeVar("_Model", bound="DraftModel")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class DraftModel(TreeSpec):
    """A model by folder, built-in or hub name. ``vocab``: how another vocabulary than the target's
    is used: "intersection", "string", or "auto" by what the two share. ``quantize``: "int8" or
    "int4", in place of the setting for all drafts."""

    kind = "model"
    page = "draft_model.md"
    holds = "model"
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
    vocab: str = "auto"
    quantize: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize is not None and self.quantize not in BITS:
            raise self.refuse(f"quantize={self.quantize!r} is not known; use {' or '.join(BITS)}")

    def precisions(self: _Model) -> dict[str, _Model]:
        if self.quantize is not None or self.shape() is not None:
            return {}
        return {name: replace(self, nodes=0, quantize=name) for name in BITS}

    def prepare(self, loading: Loading) -> Prepared:
        model, match = self._load(loading)

        def build(context: DraftContext) -> Drafter:
            texts = match is not None and match.method == "string"
            # The end of a re-tokenised text may change; shared blocks must not.
            more = not texts, model.device, model.rope_switch
            cache = context.new_cache(model.cache_shapes, model.dtype, *more)
            cache.states = model.new_states()
            levels, device = self.levels(context, cache), context.target.device
            widths = loading.target.vocab_size, model.vocab_size
            if match is None:
                return ModelDrafter(model, levels, SharedVocabulary(*widths), device)
            if texts:
                return StringDrafter(model, levels, match, device)
            return ModelDrafter(model, levels, Intersection(match, widths, model.device), device)

        if match is not None and match.method == "string" and model.state_bytes:
            raise self.refuse(
                "its recurrent layers cannot go back to where a text is tokenised otherwise; "
                "take a draft with the target's vocabulary"
            )
        cached = bytes_per_token(model.cache_shapes, model.dtype)
        return Prepared(build, cached, state_bytes=model.state_bytes)

    def _load(self, loading: Loading) -> tuple[CausalModel, Match | None]:
        """The model, and how its vocabulary is translated if it is another one."""
        target, tokenizer = loading.target, loading.tokenizer
        draft = CausalModel.load(
            self.path,
            loading.dtype,
            loading.device or str(target.device),
            check_values=True,
            quantize=self.quantize or loading.quantize,
            backend=target.asked,
            offload=loading.offload,
        )
        if draft.note:
            info(f"the draft: {draft.note}")
        folder = Path(fetched(self.path))
        names_one = any((folder / name).is_file() for name in _TOKENIZER_FILES)
        if not folder.is_dir() or gguf_file(str(folder)) or names_one:
            draft_tokenizer = load_tokenizer(self.path)
        else:
            draft_tokenizer = tokenizer
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


@dataclass
class _State:
    """The draft's cache of one sequence.

    ``tokens``: the sequence's first ``read`` tokens in the draft's vocabulary, of which ``cached``
    are in the cache. Behind them, from ``base`` on, stand the expanded nodes: node i of the last
    proposal at ``base + slots[i]``, or nowhere where that is -1.
    """

    seq_id: int
    tokens: list[int] = field(default_factory=list)
    read: int = 0
    cached: int = 0
    base: int = 0
    slots: tuple[int, ...] = ()
    scheduled: bool = False  # in the present step


class ModelDrafter(LevelDrafter):
    """Drafts with a model; ``vocabulary`` translates the target's ids."""

    reads = True  # it reads a prompt before it drafts

    def __init__(
        self,
        model: CausalModel,
        levels: Levels,
        vocabulary: SharedVocabulary,
        deliver_to: torch.device,
    ) -> None:
        """``deliver_to``: the target's device."""
        super().__init__(levels, model.max_positions)
        self._deliver_to = deliver_to
        self._empty = TokenTree.empty(deliver_to)
        self.model = model
        self._vocabulary = vocabulary
        self._states: States[_State] = States()

    @property
    def vocabulary(self) -> str | None:
        """How another vocabulary is translated; None if the draft shares the target's."""
        return self._vocabulary.description

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        if not any(item.draft_length or not item.decodes for item in plan.slices):
            return [self._empty] * len(plan.slices)
        return super().propose(plan)

    @property
    def growth(self) -> Growth | None:
        plain = type(self._vocabulary) is SharedVocabulary  # ids are the target's
        return self.model.backend.growth if plain else None

    def _first(self, spans: Sequence[Span], trees: Sequence[Growing]) -> torch.Tensor:
        logits = self.model(self.cache.batch_of(spans), self.cache).logits
        return self._vocabulary.logits(logits)

    def _level(self, trees: list[Growing]) -> torch.Tensor:
        nodes = self._vocabulary.nodes
        return self._first([level_span(tree, nodes(tree.fresh)) for tree in trees], trees)

    def _made_up(self, trees: Sequence[Growing]) -> torch.Tensor:
        size, model = (len(trees), self.model.vocab_size), self.model
        return self._vocabulary.logits(torch.zeros(size, dtype=model.dtype, device=model.device))

    def _finish(self, item: Slice, done: GrownTree) -> TokenTree:
        self._states[item.seq.seq_id].slots = done.slots
        return done.tree.on(self._deliver_to)

    def _span(self, item: Slice) -> Span | None:
        """The committed tokens that the draft has not seen; None to leave it alone, or without
        cache room."""
        seq = item.seq
        state = self._states.of(seq, lambda seq: _State(seq.seq_id))
        self._read(state, seq.tokens[state.read :])
        drafts = item.decodes and self._policy.depth(item.draft_length) > 0
        beyond = len(state.tokens) + item.draft_length >= self.model.max_positions
        # Prompt chunks are prefilled along with the target's; plain steps are read later.
        left_alone = beyond or (item.decodes and not drafts)
        return None if left_alone else self._catch_up(item, state)

    def _read(self, state: _State, tokens: Sequence[int]) -> None:
        """Append the next tokens of a sequence."""
        state.tokens += self._vocabulary.context(tokens)
        state.read += len(tokens)

    def _catch_up(self, item: Slice, state: _State) -> Span | None:
        seq, tokens = item.seq, state.tokens
        # The draft's tokens for a prompt may be more or fewer than the target's.
        known = len(seq.tokens) if item.decodes else seq.cached + item.scheduled
        end = len(tokens) * known // len(seq.tokens)
        nodes = self._policy.max_expanded(item.draft_length) if item.decodes else 0
        if seq.seq_id not in self.cache:
            state.cached = self.cache.admit(seq.seq_id, tokens)
        if state.cached >= end:
            return None  # a prompt chunk from the draft's prefix cache
        try:
            self.cache.reserve(seq.seq_id, end + nodes)
        except OutOfBlocksError:
            self._drop(state)
            return None
        span = Span.of(
            seq.seq_id, state.cached, tokens[state.cached : end], wants_logits=item.decodes
        )
        state.cached = state.base = end
        state.slots = ()
        state.scheduled = True
        return span

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Keep accepted nodes that were expanded, free the others."""
        moves: list[tuple[int, int, int]] = []
        kept: list[tuple[_State, int, Commit]] = []
        for commit in commits:
            state = self._states.get(commit.seq_id)
            if state is None or not state.scheduled or commit.seq_id not in self.cache:
                continue
            # Nodes without children were not expanded: they are pending.
            slots = [state.slots[node] for node in commit.path if node < len(state.slots)]
            expanded = [slot for slot in slots if slot >= 0]
            moves.extend(path_moves(commit.seq_id, state.base, expanded))
            kept.append((state, len(expanded), commit))
        self.cache.move(moves)
        for state, count, commit in kept:
            state.cached += count
            state.slots = ()
            state.scheduled = False
            self._read(state, commit.tokens)
            self.cache.commit(state.seq_id, state.tokens, state.cached)

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        self.cache.free(seq_id)

    def _drop(self, state: _State) -> None:
        """Out of blocks: free the sequence's cache; it starts over when there is room."""
        self.cache.free(state.seq_id)
        state.cached, state.slots = 0, ()


class StringDrafter(ModelDrafter):
    """Drafts for shadows of the sequences and translates trees by their text: each path is
    tokenised again, and paths that begin alike share nodes."""

    prefers_seeds = False  # a shadow is not sampled

    def __init__(
        self, model: CausalModel, levels: Levels, match: Match, deliver_to: torch.device
    ) -> None:
        size = model.vocab_size
        super().__init__(model, levels, SharedVocabulary(size, size), deliver_to)
        covered = f"shared tokens {100 * match.share:.0f} % of text"
        self._vocabulary.description = f"string-level match, {covered}"
        self._match = match
        self._shadows: States[Shadow] = States()

    def propose(self, plan: Plan) -> list[TokenTree]:
        slices = tuple(self._shadow(item).slice_of(item) for item in plan.slices)
        drafts = super().propose(Plan(slices))
        parts = [draft.tokens for draft in drafts if len(draft)]
        values = iter(torch.cat(parts).tolist() if parts else ())
        pairs = zip(plan.slices, drafts, strict=True)
        return [self._translated(item, d, list(islice(values, len(d)))) for item, d in pairs]

    def _shadow(self, item: Slice) -> Shadow:
        return self._shadows.of(item.seq, lambda seq: Shadow(seq.seq_id, self._match))

    def _translated(self, item: Slice, draft: TokenTree, tokens: Sequence[int]) -> TokenTree:
        if not tokens:
            return self._empty
        text, length = self._shadows[item.seq.seq_id].text, item.draft_length
        pairs = zip(paths_of(draft.parents), children_of(draft.parents), strict=True)
        leaves = ([tokens[node] for node in path] for path, below in pairs if not below)
        proposals = (text.proposal(leaf)[:length] for leaf in leaves)
        merged, parents = merge(proposals, self.max_nodes(length))
        return TokenTree(to_device(merged, draft.tokens.device), parents)

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """The draft keeps settled tokens and reads its drafts again as text."""
        for commit in commits:
            state, shadow = self._states.get(commit.seq_id), self._shadows.get(commit.seq_id)
            if state is not None and shadow is not None:
                length = len(shadow.text.settled)
                del state.tokens[length:]
                state.read = len(state.tokens)
                state.cached, state.slots = min(state.cached, length), ()
                if commit.seq_id in self.cache:
                    self.cache.commit(commit.seq_id, state.tokens, state.cached)

    def forget(self, seq_id: int) -> None:
        self._shadows.pop(seq_id, None)
        super().forget(seq_id)

"""Running a draft model: level by level, or in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice, Span
from paceline.core.tree import TokenTree
from paceline.draft.base import States
from paceline.draft.trees.grow import GrowingTree, Logits
from paceline.draft.trees.levels import GrowthSettings, LevelDrafter
from paceline.draft.trees.one_pass import OnePassDrafter
from paceline.draft.vocabulary import SharedVocabulary
from paceline.model.backends.base import GrownTree, TreeGrower
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import path_moves
from paceline.model.target import CausalModel


@dataclass
class DraftState:
    """The draft model's cache of one sequence.

    ``tokens``: the sequence's first ``translated`` tokens in the draft's vocabulary. The first
    ``cached`` of them have keys and values. The expanded nodes follow from row ``base`` on: node i
    of the last proposal is in row ``base + slots[i]``, or has no row if ``slots[i]`` is -1.
    """

    seq_id: int
    tokens: list[int] = field(default_factory=list)
    translated: int = 0
    cached: int = 0
    base: int = 0
    slots: tuple[int, ...] = ()
    scheduled: bool = False  # whether this step runs tokens of the sequence


class ModelDrafter(LevelDrafter):
    """Drafts with a model. ``vocabulary`` translates between the target's ids and the draft's."""

    needs_prefill = True  # the model must run over a prompt before it can draft
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
        self._states: States[DraftState] = States()

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

    def _run_spans(self, spans: Sequence[Span], trees: Sequence[GrowingTree]) -> Logits:
        logits = self.model(self.cache.batch_of(spans), self.cache).logits
        return self._vocabulary.logits(logits)

    def _run_frontiers(self, trees: list[GrowingTree]) -> Logits:
        nodes = self._vocabulary.nodes
        return self._run_spans([tree.frontier_span(nodes(tree.frontier)) for tree in trees], trees)

    def _warm_up_logits(self, trees: Sequence[GrowingTree]) -> Logits:
        size, model = (len(trees), self.model.vocab_size), self.model
        return self._vocabulary.logits(torch.zeros(size, dtype=model.dtype, device=model.device))

    def _to_proposal(self, item: Slice, grown: GrownTree) -> TokenTree:
        self._states[item.seq.seq_id].slots = grown.slots if self._keeps_rows else ()
        return grown.tree.on(self._deliver_to)

    def _context_span(self, item: Slice) -> Span | None:
        """The committed tokens that the draft has not seen, if they are needed and fit."""
        seq = item.seq
        state = self._states.of(seq, lambda seq: DraftState(seq.seq_id))
        self._append(state, seq.tokens[state.translated :])
        drafts = item.decodes and self._policy.depth(item.draft_length) > 0
        beyond = len(state.tokens) + item.draft_length >= self.model.max_positions
        # Prompt chunks run at once; the tokens of steps without a draft wait for the next draft.
        skip = beyond or (item.decodes and not drafts)
        return None if skip else self._catch_up(item, state)

    def _append(self, state: DraftState, tokens: Sequence[int]) -> None:
        """Translate the sequence's next tokens and append them to ``state.tokens``."""
        state.tokens += self._vocabulary.context(tokens)
        state.translated += len(tokens)

    def _catch_up(self, item: Slice, state: DraftState) -> Span | None:
        seq, tokens = item.seq, state.tokens
        # In another vocabulary a prompt has more or fewer tokens than in the target's.
        known = len(seq.tokens) if item.decodes else seq.cached + item.scheduled
        end = len(tokens) * known // len(seq.tokens)
        nodes = self._rows_for_nodes(item.draft_length) if item.decodes else 0
        if seq.seq_id not in self.cache:
            state.cached = self.cache.admit(seq.seq_id, tokens)
        if state.cached >= end:
            return None  # the draft's prefix cache already has this prompt chunk
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
        """Keep the cache rows of accepted nodes that were expanded, free the others."""
        super().observe(commits, out)
        moves: list[tuple[int, int, int]] = []
        kept: list[tuple[DraftState, int, Commit]] = []
        for commit in commits:
            state = self._states.get(commit.seq_id)
            if state is None or not state.scheduled or commit.seq_id not in self.cache:
                continue
            # Nodes without children were not expanded and have no rows: their tokens stay pending.
            slots = [state.slots[node] for node in commit.path if node < len(state.slots)]
            expanded = [slot for slot in slots if slot >= 0]
            moves.extend(path_moves(commit.seq_id, state.base, expanded))
            kept.append((state, len(expanded), commit))
        self.cache.move(moves)
        for state, count, commit in kept:
            state.cached += count
            state.slots = ()
            state.scheduled = False
            self._append(state, commit.tokens)
            self.cache.commit(state.seq_id, state.tokens, state.cached)

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        super().forget(seq_id)

    def _drop(self, state: DraftState) -> None:
        """Out of blocks: free the sequence's cache. It starts over when there is room again."""
        self.cache.free(state.seq_id)
        state.cached, state.slots = 0, ()


class ParallelDrafter(OnePassDrafter, ModelDrafter):
    """Drafts all its tokens in one pass with a model that was trained for it."""

    _keeps_rows = False  # rows of masks

    def _pass_logits(self, spans: Sequence[Span]) -> torch.Tensor:
        logits = self.model(self.cache.batch_of(spans), self.cache).logits
        return self._vocabulary.logits(logits)

"""Running a draft model: level by level, in one pass, or in its own vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice, Span
from paceline.core.params import SamplingParams
from paceline.core.sequence import PerSequence
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree, children_of, paths_of
from paceline.draft.trees.grow import GrowingTree, Logits
from paceline.draft.trees.levels import (
    CachedRows,
    CachingDrafter,
    GrowthSettings,
    OnePassDrafter,
)
from paceline.draft.trees.shape import merge
from paceline.draft.vocabulary import Match, Retokeniser, SharedVocabulary
from paceline.model.backends.base import GrownTree, TreeGrower
from paceline.model.paged.cache import path_moves
from paceline.model.target import CausalModel


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


class StringDrafter(ModelDrafter):
    """Translates trees by their text: each path is tokenised for the target, and common prefixes
    are merged. The draft's cache keeps the settled tokens; the last word and drafts run again.

    The drafts are the draft model's likeliest tokens, for sampled requests, too: without common ids
    there is no q, so ``Draw`` is POINT. Texts are on the host, which takes one more synchronisation
    per draft."""

    prefers_seeds = False  # it never samples
    _follows_grammar = False
    _keeps_rows = False  # of tokens that may be written otherwise

    def __init__(
        self, match: Match, model: CausalModel, settings: GrowthSettings, deliver_to: torch.device
    ) -> None:
        ids = SharedVocabulary(model.vocab_size, model.vocab_size)  # trees have the draft's ids
        ids.description = f"string-level match, shared tokens {100 * match.share:.0f} % of text"
        super().__init__(model, settings, ids, deliver_to)
        self.cache.shares = False  # the end of a text may change; shared blocks must not
        self._match = match
        self._texts: PerSequence[Retokeniser] = PerSequence()

    def propose(self, plan: Plan) -> list[TokenTree]:
        for item in plan.slices:
            self._texts.get_or_make(item.seq, lambda _: Retokeniser(self._match))
        drafts = super().propose(Plan(tuple(map(_as_greedy, plan.slices))))
        parts = [draft.tokens for draft in drafts if len(draft)]
        values = iter(torch.cat(parts).tolist() if parts else ())
        pairs = zip(plan.slices, drafts, strict=True)
        return [self._translated(item, d, list(islice(values, len(d)))) for item, d in pairs]

    def _translated(self, item: Slice, draft: TokenTree, tokens: Sequence[int]) -> TokenTree:
        text, length = self._texts[item.seq.seq_id], item.draft_length
        self._calibrations.forget(item.seq.seq_id)  # the verdict is on other nodes
        if not tokens or text.waits:
            return self._empty
        pairs = zip(paths_of(draft.parents), children_of(draft.parents), strict=True)
        leaves = ([tokens[node] for node in path] for path, below in pairs if not below)
        proposals = (text.proposal(leaf)[:length] for leaf in leaves)
        merged, parents = merge(proposals, self.max_nodes(length))
        return TokenTree(to_device(merged, draft.tokens.device), parents)

    def _append(self, seq_id: int, tokens: Sequence[int]) -> None:
        if tokens:
            text, rows = self._texts[seq_id], self._rows[seq_id]
            rows.cached = min(rows.cached, len(text.settled))
            text.extend(tokens)
            rows.keys[:] = text.context()
            rows.translated += len(tokens)

    def forget(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
        super().forget(seq_id)


def _as_greedy(item: Slice) -> Slice:
    """The slice as one of a greedy request without penalties or grammar."""
    seq = replace(item.seq, params=SamplingParams(), constraint=None)
    return replace(item, seq=seq)

"""A small model drafts for a large one: chains, or static trees of a given branching.

Leviathan et al. 2023 and Chen et al. 2023 (chains), SpecInfer (Miao et al. 2024, trees). The
draft model has a paged cache of its own. One forward drafts one level for the whole batch::

    level 1: tokens the draft has not seen (the last commit's; the prompt at first)
    level 2: the nodes of level 1, each attending to its ancestors   ... and so on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.draws import Drafted, draft, draw_of
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows, needs_paths
from paceline.core.sequence import Sequence as Request
from paceline.core.transfer import to_device
from paceline.core.tree import Draw, TokenTree
from paceline.model.blocks import OutOfBlocksError
from paceline.model.cache import Feed, PagedCache, path_moves
from paceline.model.target import CausalModel


@dataclass
class _State:
    """What the draft's cache holds of one sequence.

    ``cached`` committed tokens, then ``nodes`` tree nodes of the last proposal behind ``base``.
    """

    seq: Request
    cached: int = 0
    base: int = 0
    nodes: int = 0


@dataclass
class _Growing:
    """A tree while it grows: levels of tokens ``[width]`` and their laws ``[width, vocab]``."""

    item: Slice
    state: _State
    parents: tuple[int, ...]
    tokens: list[torch.Tensor]
    laws: list[torch.Tensor]


class ModelDrafter:
    """Drafts with a model that shares the target's vocabulary.

    ``branching`` gives the children per node, level by level (beyond it, one); None is a chain.
    """

    features: tuple[int, ...] = ()

    def __init__(
        self,
        model: CausalModel,
        cache: PagedCache,
        target_vocab: int,
        generator: torch.Generator | None,
        branching: Sequence[int] | None = None,
    ) -> None:
        self.name = "model" if branching is None else "tree"
        self.model = model
        self.cache = cache
        self._width = min(target_vocab, model.vocab_size)  # ids that both models know
        self._generator = generator
        self._branching = tuple(branching or ())
        self._states: dict[int, _State] = {}
        self._empty = TokenTree.empty(model.device)

    def max_nodes(self, length: int) -> int:
        return sum(accumulate(self._levels(length), mul))

    def passes(self, length: int) -> int:
        return len(self._levels(length))

    def _levels(self, length: int) -> tuple[int, ...]:
        """Children per node of a tree of ``length`` levels; a tree is never deeper than asked."""
        return self._branching[:length] if self._branching else (1,) * length

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        growing: dict[int, _Growing] = {}
        feeds: list[Feed] = []
        for item in plan.slices:
            state = self._state(item)
            feed = None if state is None else self._catch_up(item, state)
            if state is None or feed is None:
                continue
            feeds.append(feed)
            if feed.wants_logits:
                growing[item.seq.seq_id] = _Growing(item, state, (), [], [])
        if feeds:
            self._grow(list(growing.values()), feeds)
        return [
            self._tree(growing[item.seq.seq_id]) if item.seq.seq_id in growing else self._empty
            for item in plan.slices
        ]

    def _state(self, item: Slice) -> _State | None:
        """State of a sequence to be advanced in this step; None if it is left alone."""
        seq = item.seq
        state = self._states.get(seq.seq_id)
        if state is None:
            state = self._states[seq.seq_id] = _State(seq)
        drafts = item.decodes and item.draft_length > 0
        beyond = len(seq.tokens) + item.draft_length >= self.model.max_positions
        # A prompt chunk is prefilled along with the target's; a plain step is caught up on later.
        return state if (drafts or not item.decodes) and not beyond else None

    def _catch_up(self, item: Slice, state: _State) -> Feed | None:
        """Feed the committed tokens that the draft has not seen; None if it has no cache for it."""
        seq = item.seq
        end = len(seq.tokens) if item.decodes else seq.cached + item.feed
        nodes = self.max_nodes(item.draft_length) if item.decodes else 0
        if seq.seq_id not in self.cache:
            state.cached = self.cache.admit(seq.seq_id, seq.tokens)
        if state.cached >= end:
            return None  # a prompt chunk that came out of the draft's own prefix cache
        try:
            self.cache.reserve(seq.seq_id, end + nodes)
        except OutOfBlocksError:
            self._drop(state)
            return None
        pending = [
            min(token, self.model.vocab_size - 1) for token in seq.tokens[state.cached : end]
        ]
        feed = Feed(seq.seq_id, state.cached, pending, wants_logits=item.decodes)
        state.cached = state.base = end
        state.nodes = 0
        return feed

    def _grow(self, trees: list[_Growing], feeds: list[Feed]) -> None:
        """Level after level, each one forward over all sequences that still grow."""
        level = 0
        while True:
            logits = self.model(self.cache.pack(feeds), self.cache).logits
            if not trees:
                return  # nothing but prompt chunks
            drafted = self._draw(trees, level, logits[:, : self._width])
            feeds = []
            unfinished: list[_Growing] = []
            for tree, tokens, laws in drafted:
                width = self._levels(tree.item.draft_length)[level]
                rows = len(tokens) // width
                first = len(tree.parents) - rows if level else -1
                new = tuple(first + row for row in range(rows) for _ in range(width))
                tree.parents += new
                tree.tokens.append(tokens)
                if laws is not None:
                    tree.laws.append(laws)
                if level + 1 < len(self._levels(tree.item.draft_length)):
                    unfinished.append(tree)
                    feeds.append(self._level_feed(tree, tokens))
            if not unfinished:
                return
            trees = unfinished
            level += 1

    def _level_feed(self, tree: _Growing, tokens: torch.Tensor) -> Feed:
        first_new = len(tree.parents) - len(tokens)
        tree.state.nodes = len(tree.parents)
        return Feed(tree.item.seq.seq_id, tree.state.cached, (), tree.parents, tokens, first_new)

    def _draw(
        self, trees: list[_Growing], level: int, logits: torch.Tensor
    ) -> list[tuple[_Growing, torch.Tensor, torch.Tensor | None]]:
        """Children of the newest level of every tree: tokens [rows * k] and their laws."""
        widths = [self._levels(tree.item.draft_length)[level] for tree in trees]
        counts = [self._rows(tree, level) for tree in trees]
        seqs = tuple(
            tree.item.seq for tree, count in zip(trees, counts, strict=True) for _ in range(count)
        )
        paths = self._paths(trees, level) if level and needs_paths(seqs) else None
        rows = Rows(seqs, (level,) * len(seqs), paths)
        drafted: Drafted = draft(logits, rows, max(widths), self._generator)
        result = []
        start = 0
        for tree, count, width in zip(trees, counts, widths, strict=True):
            tokens = drafted.tokens[start : start + count, :width].reshape(-1)
            laws = None
            if drafted.q is not None and draw_of(tree.item.seq) is not Draw.POINT:
                laws = drafted.q[start : start + count]
                if width > 1:
                    laws = laws.repeat_interleave(width, dim=0)
            result.append((tree, tokens, laws))
            start += count
        return result

    def _rows(self, tree: _Growing, level: int) -> int:
        return len(tree.tokens[-1]) if level else 1

    def _paths(self, trees: list[_Growing], level: int) -> torch.Tensor:
        """int64 [rows, level]: drafted tokens from the root to each newest node."""
        parts = []
        for tree in trees:
            tokens = torch.cat(tree.tokens)
            index: list[list[int]] = []
            for node in range(len(tree.parents) - len(tree.tokens[-1]), len(tree.parents)):
                path = [node]
                while tree.parents[path[0]] >= 0:
                    path.insert(0, tree.parents[path[0]])
                index.append(path)
            parts.append(tokens[to_device(index, tokens.device)])
        return torch.cat(parts)

    def _tree(self, tree: _Growing) -> TokenTree:
        tokens = torch.cat(tree.tokens) if len(tree.tokens) > 1 else tree.tokens[0]
        siblings = max(self._levels(tree.item.draft_length)) > 1
        draw = draw_of(tree.item.seq, siblings)
        laws = None
        if draw is not Draw.POINT:
            laws = torch.cat(tree.laws) if len(tree.laws) > 1 else tree.laws[0]
        return TokenTree(tokens, tree.parents, draw, laws)

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Keep the accepted nodes that were fed to the draft, give the others back."""
        moves: list[tuple[int, int, int]] = []
        kept: list[tuple[_State, int]] = []
        for commit in commits:
            state = self._states.get(commit.seq_id)
            if state is None or commit.seq_id not in self.cache:
                continue
            # The last level's tokens were never fed: they are pending, like the target's own.
            path = [node for node in commit.path if node < state.nodes]
            moves.extend(path_moves(commit.seq_id, state.base, path))
            kept.append((state, len(path)))
        self.cache.move(moves)
        for state, count in kept:
            state.cached += count
            state.nodes = 0
            self.cache.commit(state.seq.seq_id, state.seq.tokens, state.cached)

    def rehearse(self, batch_size: int) -> None:
        """One level: a forward over one token of each sequence, and its choice."""
        size = self.cache.block_size
        blocks = min(4, self.cache.num_blocks, self.model.max_positions // size)
        batch_size = max(1, min(batch_size, self.cache.num_blocks // max(1, blocks)))
        context = max(1, blocks * size) - 1
        ids = range(-batch_size, 0)
        seqs = tuple(Request(seq_id, [0], 1, SamplingParams()) for seq_id in ids)
        for seq_id in ids:
            self.cache.admit(seq_id, [0])
            self.cache.reserve(seq_id, context + 1)
        try:
            batch = self.cache.pack([Feed(seq_id, context, (0,)) for seq_id in ids])
            logits = self.model(batch, self.cache).logits
            draft(logits[:, : self._width], Rows(seqs, (0,) * batch_size), 1, self._generator)
        finally:
            for seq_id in ids:
                self.cache.free(seq_id)

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        self.cache.free(seq_id)

    def _drop(self, state: _State) -> None:
        """Out of blocks: give this sequence's up and start over when there is room."""
        self.cache.free(state.seq.seq_id)
        state.cached = state.nodes = 0

"""A small model drafts for a large one: chains, static trees, or best-first trees.

Leviathan et al. 2023 and Chen et al. 2023 (chains), SpecInfer (Miao et al. 2024, trees). The
draft model has a paged cache of its own. One forward drafts one level for the whole batch::

    level 1: tokens the draft has not seen (the last commit's; the prompt at first)
    level 2: the nodes of level 1, each attending to its ancestors   ... and so on
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.tree import TokenTree
from paceline.draft.trees.grow import Growing, grow, level_feed
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.rehearsal import rehearse_level
from paceline.draft.vocabulary.shared import Vocabulary
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import Feed, PagedCache, path_moves
from paceline.model.target import CausalModel


@dataclass
class _State:
    """What the draft's cache holds of one sequence.

    ``tokens``: the first ``read`` tokens of the sequence in the draft's vocabulary. ``cached`` of
    them, then the nodes that were expanded behind ``base``: node i of the last proposal is at index
    ``base + slots[i]``, or was never expanded where that is -1.
    """

    seq_id: int
    tokens: list[int] = field(default_factory=list)
    read: int = 0
    cached: int = 0
    base: int = 0
    slots: tuple[int, ...] = ()
    scheduled: bool = False  # in the step under way


class ModelDrafter:
    """Drafts with a model, in the target's ids: ``vocabulary`` says how they become the draft's."""

    features: tuple[int, ...] = ()
    reads = True  # a prompt, before it drafts

    def __init__(
        self,
        model: CausalModel,
        cache: PagedCache,
        vocabulary: Vocabulary,
        generator: torch.Generator | None,
        policy: Policy,
        name: str = "model",
    ) -> None:
        self.name = name
        self.model = model
        self.cache = cache
        self._vocabulary = vocabulary
        self._generator = generator
        self._policy = policy
        self._states: dict[int, _State] = {}
        self._empty = TokenTree.empty(model.device)

    @property
    def vocabulary(self) -> str | None:
        """How another vocabulary than the target's is used; None if the draft shares it."""
        return self._vocabulary.description

    def max_nodes(self, length: int) -> int:
        return self._policy.max_nodes(length)

    def passes(self, length: int) -> int:
        return self._policy.depth(length)

    # -- proposing ---------------------------------------------------------------------------

    def propose(self, plan: Plan) -> list[TokenTree]:
        if not any(item.draft_length or not item.decodes for item in plan.slices):
            return [self._empty] * len(plan.slices)
        growing: dict[int, Growing] = {}
        feeds: list[Feed] = []
        for item in plan.slices:
            state = self._state(item)
            feed = None if state is None else self._catch_up(item, state)
            if feed is None:
                continue
            feeds.append(feed)
            if feed.wants_logits:
                growing[item.seq.seq_id] = self._policy.start(item, self.model.device)
        if feeds:
            logits = self._logits(feeds)
            grow(list(growing.values()), logits, self._level, self._generator)
        trees = []
        for item in plan.slices:
            tree = growing.get(item.seq.seq_id)
            trees.append(self._empty if tree is None else self._finish(tree))
        return trees

    def _logits(self, feeds: Sequence[Feed]) -> torch.Tensor:
        out = self.model(self.cache.batch_of(feeds), self.cache)
        return self._vocabulary.logits(out.logits)

    def _level(self, trees: list[Growing]) -> torch.Tensor:
        """Feed the newest nodes of some trees."""
        feeds = []
        for tree in trees:
            seq_id = tree.item.seq.seq_id
            feed = level_feed(tree, self._states[seq_id].base)
            feeds.append(replace(feed, nodes=self._vocabulary.nodes(tree.fresh)))
        return self._logits(feeds)

    def _finish(self, tree: Growing) -> TokenTree:
        done, self._states[tree.item.seq.seq_id].slots = tree.finish()
        return done

    def _state(self, item: Slice) -> _State | None:
        """State of a sequence to be advanced in this step; None if it is left alone."""
        seq = item.seq
        state = self._states.get(seq.seq_id)
        if state is None:
            state = self._states[seq.seq_id] = _State(seq.seq_id)
        self._read(state, seq.tokens[state.read :])
        drafts = item.decodes and self._policy.depth(item.draft_length) > 0
        beyond = len(state.tokens) + item.draft_length >= self.model.max_positions
        # A prompt chunk is prefilled along with the target's; a plain step is caught up on later.
        return state if (drafts or not item.decodes) and not beyond else None

    def _read(self, state: _State, tokens: Sequence[int]) -> None:
        """The next tokens of a sequence."""
        state.tokens += self._vocabulary.context(tokens)
        state.read += len(tokens)

    def _catch_up(self, item: Slice, state: _State) -> Feed | None:
        """Feed the committed tokens that the draft has not seen; None if it has no cache for it."""
        seq, tokens = item.seq, state.tokens
        # The draft may take more or fewer tokens for a prompt than the target does.
        known = len(seq.tokens) if item.decodes else seq.cached + item.scheduled
        end = len(tokens) * known // len(seq.tokens)
        nodes = self._policy.max_expanded(item.draft_length) if item.decodes else 0
        if seq.seq_id not in self.cache:
            state.cached = self.cache.admit(seq.seq_id, tokens)
        if state.cached >= end:
            return None  # a prompt chunk that came out of the draft's own prefix cache
        try:
            self.cache.reserve(seq.seq_id, end + nodes)
        except OutOfBlocksError:
            self._drop(state)
            return None
        feed = Feed(seq.seq_id, state.cached, tokens[state.cached : end], wants_logits=item.decodes)
        state.cached = state.base = end
        state.slots = ()
        state.scheduled = True
        return feed

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Keep the accepted nodes that the draft expanded, give the others back."""
        moves: list[tuple[int, int, int]] = []
        kept: list[tuple[_State, int, Commit]] = []
        for commit in commits:
            state = self._states.get(commit.seq_id)
            if state is None or not state.scheduled or commit.seq_id not in self.cache:
                continue
            # Nodes without children were never expanded: they are pending, like the target's own
            # token.
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

    def keep(self, seq_id: int, length: int) -> None:
        """Forget what was read of a sequence beyond ``length`` tokens, and all nodes.

        In place of ``observe`` for a sequence whose last tokens may change.
        """
        state = self._states.get(seq_id)
        if state is None:
            return
        del state.tokens[length:]
        state.read = len(state.tokens)
        state.cached, state.slots = min(state.cached, length), ()
        if seq_id in self.cache:
            self.cache.commit(seq_id, state.tokens, state.cached)

    def rehearse(self, batch_size: int) -> None:
        """One level of each sequence's tree."""
        most = self.model.max_positions
        rehearse_level(self._logits, self.cache, batch_size, most, self._generator, self._policy)

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        self.cache.free(seq_id)

    def _drop(self, state: _State) -> None:
        """Out of blocks: give this sequence's up and start over when there is room."""
        self.cache.free(state.seq_id)
        state.cached, state.slots = 0, ()

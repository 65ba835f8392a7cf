"""EAGLE drafters: a one-layer head continues the target's own features.

EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (2406.16858: best-first trees over the same
weights) and EAGLE-3 (2503.01840: three fused layers, its own vocabulary). The differences are in
the head and in the policy; this loop serves all. The head has a paged cache of its own, whose row
for position t holds the target's feature there and the token after it::

    position            0    1    2   ...  n-2   n-1
    committed token     x0   x1   x2        .    x_last      its feature is not known yet
    row                (f0,x1) (f1,x2) ... (f_n-2, x_last) -> logits of the first drafted token
    drafted rows       (h, y1) (h', y2) ...   h: the head's own output in the place of a feature

Drafted rows are never kept: once a token is accepted its true feature takes their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from paceline.core.batch import Commit, ModelOutput, Plan, Slice
from paceline.core.sequence import SequenceView
from paceline.core.transfer import to_device
from paceline.core.tree import TokenTree
from paceline.draft.heads.eagle_head import EagleHead
from paceline.draft.heads.eagle_lean import LeanEagle
from paceline.draft.trees.grow import Growing, grow, level_feed
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.rehearsal import rehearse_level
from paceline.model.backends.reference.attention import paged_attention
from paceline.model.paged.blocks import OutOfBlocksError
from paceline.model.paged.cache import Feed, PagedCache
from paceline.model.paged.masks import FULL
from paceline.model.paged.pieces import AttentionStep

Embed = Callable[[torch.Tensor], torch.Tensor]
# Features kept of a sequence that could draft but does not; the oldest are then given up, which
# costs a little acceptance and nothing else. With the rows of the last step these are all that is
# kept, and the cache is sized so that there is room for them (build.py).
MOST_WAITING = 512


@dataclass
class _State:
    """What is known of one sequence.

    The head's cache holds ``rows`` (the token of each row); features of the ``waiting`` positions,
    the first of which is ``start``, are still to be computed. Positions before ``start`` that have
    no row (a shared prefix whose features nobody saw) are simply missing from the head's context.
    """

    start: int
    rows: list[int] = field(default_factory=list)
    waiting: list[torch.Tensor] = field(default_factory=list)  # fused later, [n, k * hidden]
    count: int = 0

    @property
    def end(self) -> int:
        """The first position whose feature is not known."""
        return self.start + self.count

    def add(self, position: int, features: torch.Tensor) -> None:
        """Features of consecutive positions from ``position`` on; known ones are passed over."""
        if position > self.end:  # unseen positions lie between
            self.waiting, self.start, self.count = [], position, 0
        known = self.end - position
        if known < len(features):
            self.waiting.append(features[known:])
            self.count += len(features) - known

    def settle(self) -> None:
        """Keep what waits, and no more: a part of a step's rows would keep all of them alive."""
        if self.waiting:
            self.waiting[-1] = _alone(self.waiting[-1])
        while self.count > MOST_WAITING:
            excess, oldest = self.count - MOST_WAITING, self.waiting[0]
            if len(oldest) > excess:
                self.waiting[0] = oldest[excess:].clone()
            else:
                excess = len(self.waiting.pop(0))
            self.start += excess
            self.count -= excess

    def take(self) -> torch.Tensor:
        """All waiting features, which are about to become rows."""
        features = torch.cat(self.waiting) if len(self.waiting) > 1 else self.waiting[0]
        self.start, self.count, self.waiting = self.end, 0, []
        return features


@dataclass
class _Draft:
    """A tree that grows, and the head's outputs at the newest rows computed for it, ``[rows,
    H]``."""

    base: int
    outputs: torch.Tensor | None = None
    first: int = -1  # computed index of the first of these rows; -1 is the committed one


class EagleDrafter:
    """Drafts with an EAGLE head. ``embed`` maps the target's ids to embeddings ``[T, H]``."""

    reads = True  # what came in while it did not draft
    follows = True  # prompts, chunk by chunk

    def __init__(
        self,
        head: EagleHead | LeanEagle,
        cache: PagedCache,
        embed: Embed,
        policy: Policy,
        generator: torch.Generator | None,
        name: str = "eagle3",
    ) -> None:
        self.name = name
        self.head = head
        self.cache = cache
        self.features: tuple[int, ...] = head.config.feature_layers
        self._embed = embed
        self._policy = policy
        self._generator = generator
        self._states: dict[int, _State] = {}
        self._drafts: dict[int, _Draft] = {}
        self._empty = TokenTree.empty(cache.device)

    def max_nodes(self, length: int) -> int:
        return self._policy.max_nodes(length)

    def passes(self, length: int) -> int:
        return self._policy.depth(length)

    # -- proposing ---------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, plan: Plan) -> list[TokenTree]:
        feeds: list[Feed] = []
        inputs: list[torch.Tensor] = []
        growing: dict[int, Growing] = {}
        for item in plan.slices:
            feed = self._catch_up(item) if item.seq.params.may_draft else None
            if feed is None:
                continue
            feeds.append(feed)
            inputs.append(self._states[feed.seq_id].take())
            if feed.wants_logits:
                growing[feed.seq_id] = self._policy.start(item, self.cache.device)
                self._drafts[feed.seq_id] = _Draft(feed.context + len(feed.pending))
        for state in self._states.values():
            state.settle()
        if feeds:
            joined = torch.cat(inputs) if len(inputs) > 1 else inputs[0]
            outputs = self._run(feeds, self.head.fuse(joined))
            if growing:
                self._hand_out(list(growing), outputs, [1] * len(growing))
                grow(list(growing.values()), self._logits(outputs), self._level, self._generator)
        trees = []
        for item in plan.slices:
            tree = growing.get(item.seq.seq_id)
            trees.append(self._empty if tree is None else tree.finish()[0])
        self._drafts.clear()
        return trees

    def _catch_up(self, item: Slice) -> Feed | None:
        """Feed the rows whose features have come in; None if there is nothing to do."""
        seq = item.seq
        state = self._states.get(seq.seq_id)
        if state is None:
            state = self._states[seq.seq_id] = _State(seq.cached)
        if seq.seq_id not in self.cache:
            self._admit(seq, state)
        known = state.end == len(seq.tokens) - 1  # all but the last token's
        drafts = item.decodes and item.draft_length > 0 and known
        # A prompt is followed chunk by chunk; a plain step is caught up on later.
        if not state.count or not (drafts or not item.decodes):
            return None
        context = len(state.rows)
        end = context + state.count
        try:
            levels = self._policy.max_expanded(item.draft_length) if drafts else 0
            self.cache.reserve(seq.seq_id, end + levels)
        except OutOfBlocksError:
            self._drop(seq.seq_id)
            return None
        tokens = seq.tokens[state.start + 1 : state.end + 1]
        state.rows += _row_keys(seq.tokens, state.start, tokens)
        return Feed(seq.seq_id, context, tokens, wants_logits=drafts)

    def _admit(self, seq: SequenceView, state: _State) -> None:
        """Start the cache of a sequence, from rows of an earlier one that began alike."""
        keys = _row_keys(seq.tokens, 0, seq.tokens[1:])
        shared = self.cache.admit(seq.seq_id, keys)
        state.rows = keys[:shared]
        if shared > state.start:
            known, position = state.waiting, state.start
            state.start, state.waiting, state.count = shared, [], 0
            for features in known:
                state.add(max(position, shared), features[max(0, shared - position) :])
                position += len(features)

    def _run(self, feeds: Sequence[Feed], inputs: torch.Tensor) -> torch.Tensor:
        """One pass of the head; its outputs ``[R, H]`` at the rows whose logits are wanted."""
        batch = self.cache.batch_of(feeds)
        step = AttentionStep.of(batch, self.cache, (FULL,))
        attend = partial(paged_attention, step=step)
        embeds = self._embed(batch.input_ids)
        outputs: torch.Tensor = self.head(embeds, inputs, batch.positions, attend)
        rows = batch.logit_rows
        return outputs if rows is None else outputs.index_select(0, rows)

    def _logits(self, outputs: torch.Tensor) -> torch.Tensor:
        return self.head.expand(self.head.logits(outputs))

    def _hand_out(self, ids: Sequence[int], outputs: torch.Tensor, counts: Sequence[int]) -> None:
        for seq_id, part in zip(ids, torch.split(outputs, list(counts)), strict=True):
            self._drafts[seq_id].outputs = part

    def _level(self, trees: list[Growing]) -> torch.Tensor:
        """Feed the newest nodes of some trees, each with its parent's output for a feature."""
        feeds, inputs, ids, counts = [], [], [], []
        for tree in trees:
            seq_id = tree.item.seq.seq_id
            own = self._drafts[seq_id]
            assert own.outputs is not None
            feed = level_feed(tree, own.base)
            above = [parent - own.first for parent in tree.expanded_parents[feed.first_new :]]
            same = above == list(range(len(own.outputs)))
            inputs.append(own.outputs if same else own.outputs[to_device(above, self.cache.device)])
            own.first = feed.first_new
            feeds.append(feed)
            ids.append(seq_id)
            counts.append(len(tree.fresh))
        outputs = self._run(feeds, torch.cat(inputs) if len(inputs) > 1 else inputs[0])
        self._hand_out(ids, outputs, counts)
        return self._logits(outputs)

    # -- observing ---------------------------------------------------------------------------

    def observe(self, commits: Sequence[Commit], out: ModelOutput) -> None:
        """Note the features of what was committed; drafted rows are given back.

        Of sequences for which it was never asked to draft (those of other drafters) none are kept.
        """
        known = [commit for commit in commits if commit.seq_id in self._states]
        if not known:
            return
        rows = [_rows(commit) for commit in known]
        kept = self._joined(out.features, [row for own in rows for row in own])
        parts = torch.split(kept, [len(own) for own in rows])
        for commit, features in zip(known, parts, strict=True):
            state = self._states[commit.seq_id]
            state.add(commit.position, features)
            if commit.seq_id in self.cache:
                self.cache.commit(commit.seq_id, state.rows, len(state.rows))

    def _joined(self, features: Mapping[int, torch.Tensor], rows: list[int]) -> torch.Tensor:
        """Some rows ``[n, k * hidden]`` of a step's features, in memory of their own."""
        own = [features[layer] for layer in self.features]
        first, after = rows[0], rows[-1] + 1
        if rows == list(range(first, after)):
            own = [layer[first:after] for layer in own]
        else:
            index = to_device(rows, own[0].device)
            own = [layer.index_select(0, index) for layer in own]
        return torch.cat(own, -1) if len(own) > 1 else _alone(own[0])

    def held_bytes(self) -> int:
        """Memory of all features that wait to be computed."""
        storages = [t.untyped_storage() for s in self._states.values() for t in s.waiting]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @torch.inference_mode()
    def rehearse(self, batch_size: int) -> None:
        """One pass: a level of each sequence's tree, its logits and the choice."""

        def forward(feeds: Sequence[Feed]) -> torch.Tensor:
            like = self._embed(torch.zeros(1, dtype=torch.int64, device=self.cache.device))
            rows = sum(len(feed.parents) - feed.first_new or 1 for feed in feeds)
            hidden = like.new_zeros(rows, self.head.config.hidden_size)
            return self._logits(self._run(feeds, hidden))

        positions = self.head.config.max_positions
        rehearse_level(forward, self.cache, batch_size, positions, self._generator, self._policy)

    def forget(self, seq_id: int) -> None:
        self._states.pop(seq_id, None)
        self.cache.free(seq_id)

    def _drop(self, seq_id: int) -> None:
        """Out of blocks: give up this sequence's context; it goes on with what comes in later."""
        state = self._states[seq_id]
        self.cache.free(seq_id)
        self.cache.admit(seq_id, ())
        self._states[seq_id] = _State(state.end)


def _row_keys(tokens: Sequence[int], start: int, of_rows: Sequence[int]) -> list[int]:
    """What tells rows apart when prefixes are shared: each row's token, the first also by x0."""
    keys = list(of_rows)
    if start == 0 and keys:
        keys[0] = (keys[0] * 1_000_003 + tokens[0] + 1) & 0x7FFFFFFF
    return keys


def _rows(commit: Commit) -> list[int]:
    """Rows of a step's features that belong to the tokens scheduled and to the accepted nodes."""
    nodes = commit.row + commit.scheduled
    return [*range(commit.row, nodes), *(nodes + node for node in commit.path)]


def _alone(part: torch.Tensor) -> torch.Tensor:
    """The same values, in memory that holds nothing else."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()

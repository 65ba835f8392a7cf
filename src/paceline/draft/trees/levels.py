"""What drafters that run a model have in common: trees grow by a forward a level, for everybody."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from paceline.core.batch import Plan, Slice
from paceline.core.draws import draft
from paceline.core.params import SamplingParams
from paceline.core.sampling import Rows
from paceline.core.sequence import SequenceView
from paceline.core.tree import TokenTree
from paceline.draft.trees.grow import Growing, Logits, Narrow, candidates, grow, level_feed
from paceline.draft.trees.policy import Policy
from paceline.model.paged.cache import Feed, PagedCache

_BLOCKS = 4  # of context when rehearsing: about what the target's own costs are measured with


class LevelDrafter(ABC):
    """Runs something over ``cache``, over tokens that it has not seen, then level by level."""

    features: tuple[int, ...] = ()

    def __init__(
        self,
        name: str,
        cache: PagedCache,
        policy: Policy,
        generator: torch.Generator | None,
        max_positions: int,
    ) -> None:
        """``max_positions`` is the longest context of what is run."""
        self.name = name
        self.cache = cache
        self._policy = policy
        self._generator = generator
        self._max_positions = max_positions
        self._empty = TokenTree.empty(cache.device)

    def max_nodes(self, length: int) -> int:
        return self._policy.max_nodes(length)

    def passes(self, length: int) -> int:
        return self._policy.depth(length)

    @torch.inference_mode()
    def propose(self, plan: Plan) -> list[TokenTree]:
        found = [(item, feed) for item in plan.slices if (feed := self._feed(item)) is not None]
        growing = {
            feed.seq_id: self._policy.start(item, self.cache.device)
            for item, feed in found
            if feed.wants_logits
        }
        if found:
            logits = self._first([feed for _, feed in found])
            grow(list(growing.values()), logits, self._level, self._generator)
        return [
            self._finish(tree) if (tree := growing.get(item.seq.seq_id)) else self._empty
            for item in plan.slices
        ]

    @abstractmethod
    def _feed(self, item: Slice) -> Feed | None:
        """What has to be run before the first level; None leaves the sequence alone."""

    @abstractmethod
    def _logits(self, feeds: Sequence[Feed]) -> Logits:
        """One forward: logits after the rows that want them."""

    @abstractmethod
    def _base(self, item: Slice) -> int:
        """Rows of committed tokens in the cache, in front of the nodes."""

    def _first(self, feeds: Sequence[Feed]) -> Logits:
        return self._logits(feeds)

    def _level(self, trees: list[Growing]) -> Logits:
        """Run the newest nodes of some trees."""
        return self._logits([level_feed(t, self._base(t.item)) for t in trees])

    def _finish(self, tree: Growing) -> TokenTree:
        return tree.finish()[0]

    @torch.inference_mode()
    def rehearse(self, batch_size: int) -> None:
        """One level of each sequence's tree: the forward over its nodes, the choice, the growth."""
        cache, most = self.cache, self._max_positions
        width = min(self._policy.max_expanded(2), most // 2, cache.block_size)
        with _stand_ins(cache, batch_size, most, max(width, 1)) as (seqs, context):
            trees = [self._policy.start(Slice(seq, 1, 2), cache.device) for seq in seqs]
            made_up = torch.zeros(1, trees[0].width, device=cache.device)
            if not all([tree.extend(made_up.long(), made_up) for tree in trees]):
                # Trees of one level: their only pass is over the committed token.
                out = self._logits([Feed(seq.seq_id, context, (0,)) for seq in seqs])
                logits = out.logits if isinstance(out, Narrow) else out
                draft(logits, Rows(tuple(seqs), (0,) * len(seqs)), 1, self._generator)
                return
            out = self._logits([level_feed(tree, context) for tree in trees])
            counts = [len(tree.fresh) for tree in trees]
            found = candidates(trees, counts, out, self._generator)
            for tree, part in zip(trees, found, strict=True):
                tree.extend(*part)
                tree.finish()


@contextmanager
def _stand_ins(
    cache: PagedCache, batch_size: int, max_positions: int, nodes: int
) -> Iterator[tuple[list[SequenceView], int]]:
    """``batch_size`` made-up sequences with room for ``nodes``, and how many tokens they have.

    As many as the cache has room for. It is as before afterwards.
    """
    size = cache.block_size
    blocks = max(1, min(_BLOCKS, cache.num_blocks, max_positions // size))
    count = max(1, min(batch_size, cache.num_blocks // blocks))
    context = max(1, min(blocks * size, max_positions) - nodes)
    seqs = [SequenceView(seq_id, [0], 1, SamplingParams()) for seq_id in range(-count, 0)]
    for seq in seqs:
        cache.admit(seq.seq_id, seq.tokens)
        cache.reserve(seq.seq_id, context + nodes)
    try:
        yield seqs, context
    finally:
        for seq in seqs:
            cache.free(seq.seq_id)

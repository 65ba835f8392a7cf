"""What drafters that run a model have in common: trees grow by a forward a level, for everybody."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from paceline.core.batch import Plan, Slice
from paceline.core.tree import TokenTree
from paceline.draft.trees.grow import Growing, grow, level_feed
from paceline.draft.trees.policy import Policy
from paceline.draft.trees.rehearsal import rehearse_level
from paceline.model.paged.cache import Feed, PagedCache


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
    def _logits(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """One forward: ``[rows, vocab]`` after the rows that want logits."""

    @abstractmethod
    def _base(self, item: Slice) -> int:
        """Rows of committed tokens in the cache, in front of the nodes."""

    def _first(self, feeds: Sequence[Feed]) -> torch.Tensor:
        return self._logits(feeds)

    def _level(self, trees: list[Growing]) -> torch.Tensor:
        """Run the newest nodes of some trees."""
        return self._logits([level_feed(t, self._base(t.item)) for t in trees])

    def _finish(self, tree: Growing) -> TokenTree:
        return tree.finish()[0]

    def rehearse(self, batch_size: int) -> None:
        """One level of each sequence's tree: the forward and the choice."""
        rehearse_level(
            self._logits,
            self.cache,
            batch_size,
            self._max_positions,
            self._generator,
            self._policy,
        )

"""How a drafter's trees grow: which kind of tree a request gets, and how large it may become."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.core.batch import Slice
from paceline.core.draws import is_free
from paceline.draft.grow import BestFirstTree, Growing, StaticTree
from paceline.draft.shape import Shape

_CHAIN = Shape.branching((1,) * 64)


@dataclass(frozen=True)
class Policy:
    """The trees of one drafter, at most as deep as the draft length.

    By default a chain. ``shape``: this static tree. ``nodes``: best-first trees of that many
    nodes, expanding ``width`` nodes a level. Requests that are sampled without a seed then get
    ``shape`` (or a chain) all the same: drawing from q is accepted more often than choosing the
    likeliest.
    """

    shape: Shape = _CHAIN
    nodes: int = 0
    width: int = 4

    def depth(self, length: int) -> int:
        """Levels of a tree for draft length ``length``: passes of the drafter."""
        return length if self.nodes else min(length, self.shape.depth)

    def max_nodes(self, length: int) -> int:
        """Most nodes of a tree."""
        static = len(self.shape.cut(length))
        return max(static, min(self.nodes, self._candidates(length))) if self.nodes else static

    def max_fed(self, length: int) -> int:
        """Most nodes that are fed to the drafter while a tree grows."""
        static = len(self.shape.cut(max(0, length - 1)))
        return max(static, self.width * max(0, length - 1)) if self.nodes else static

    def _candidates(self, length: int) -> int:
        return self.width * (1 + self.width * (length - 1)) if length else 0

    def start(self, item: Slice, device: torch.device) -> Growing:
        """An empty tree for a sequence with a draft length above 0."""
        if self.nodes and not is_free(item.seq.params):
            return BestFirstTree(item, item.draft_length, self.width, self.nodes, device)
        return StaticTree(item, self.shape.cut(item.draft_length), device)

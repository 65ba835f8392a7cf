"""How a drafter's trees grow: which kind of tree a request gets, and how large it may become."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.core.batch import Slice
from paceline.core.draws import draws_unseeded
from paceline.draft.trees.grow import DynamicTree, Growing, StaticTree
from paceline.draft.trees.shape import Shape, best_shape
from paceline.draft.trees.size import TYPICAL

_CHAIN = Shape.branching((1,) * 64)
_EVENLY = 8  # levels


@dataclass(frozen=True)
class Policy:
    """The trees of one drafter, at most as deep as the draft length.

    By default a chain. ``shape``: this static tree. ``nodes``: dynamic trees of up to that many
    nodes, expanding ``width`` nodes a level. A shallow tree has fewer: ``width`` a level, or what
    leads to ``nodes`` evenly in eight levels. So draft lengths have prices of their own, and a
    batch for which all nodes are too dear still has shorter drafts to choose from. Requests that
    are sampled without a seed then get a static tree of as many nodes, drawn from q: that is
    accepted more often than the likeliest tokens, and than a chain (embedded pair, temperature 1,
    four levels: 3.03 tokens a step with 8 nodes, 2.69 with a chain).
    """

    shape: Shape = _CHAIN
    nodes: int = 0
    width: int = 4

    def depth(self, length: int) -> int:
        """Levels of a tree for draft length ``length``: passes of the drafter."""
        return min(length, self.nodes or self.shape.depth)

    def max_nodes(self, length: int) -> int:
        """Most nodes of a tree."""
        if not self.nodes:
            return len(self.shape.cut(length))
        per_level = max(self.width, -(-self.nodes // _EVENLY))
        return min(self.nodes, per_level * length)

    def max_expanded(self, length: int) -> int:
        """Most nodes that the drafter expands while a tree grows."""
        if not self.nodes:
            return len(self.shape.cut(max(0, length - 1)))
        return max(self.nodes, self.width * max(0, length - 1))

    def start(self, item: Slice, device: torch.device) -> Growing:
        """An empty tree for a sequence with a draft length above 0."""
        length = self.depth(item.draft_length)
        if not self.nodes:
            return StaticTree(item, self.shape.cut(length), device)
        if draws_unseeded(item.seq.params):
            return StaticTree(item, sampled_shape(self.max_nodes(length), length), device)
        return DynamicTree(item, length, self.width, self.max_nodes(length), device)


@lru_cache(maxsize=256)
def sampled_shape(nodes: int, length: int) -> Shape:
    """The static tree for drafts that are drawn: best where each level is accepted like this."""
    return best_shape([TYPICAL] * length, nodes)

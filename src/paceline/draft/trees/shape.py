"""Static trees, and the best one for a node budget.

Sequoia, Chen et al. 2024 (arXiv 2402.12374); OPT-Tree, Wang et al. 2024 (arXiv 2406.17276).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from paceline.core.tree import depths_of


@dataclass(frozen=True)
class Shape:
    """A static tree: node i is candidate number ``ranks[i]`` of its parent. Nodes are in order of
    their levels; the children of a node are adjacent and in order of rank."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.parents) == len(self.ranks)
        keys = list(zip(depths_of(self.parents), self.parents, self.ranks, strict=True))
        assert all(a < b for a, b in pairwise(keys)), "level by level, in rank order"

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depth(self) -> int:
        return max(depths_of(self.parents), default=0)

    @property
    def branches(self) -> bool:
        """Whether any node has siblings."""
        return len(set(self.parents)) < len(self.parents)

    @property
    def complete(self) -> bool:
        """Whether siblings have ranks 0, 1, 2, ...: sampling without replacement needs it."""
        return all(
            rank == 0 or (self.parents[node - 1], self.ranks[node - 1]) == (parent, rank - 1)
            for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True))
        )

    @classmethod
    def branching(cls, levels: Sequence[int]) -> Shape:
        """``levels[d]`` children for every node of depth d; (1, 1, 1) is a chain."""
        paths: list[tuple[int, ...]] = [()]
        every: list[tuple[int, ...]] = []
        for width in levels:
            paths = [(*path, rank) for path in paths for rank in range(width)]
            every += paths
        return cls.of_paths(every)

    @classmethod
    def of_paths(cls, paths: Sequence[tuple[int, ...]]) -> Shape:
        """A shape from each node's path of ranks, as in Medusa's choices; prefixes are added."""
        wanted = {path[:n] for path in paths for n in range(1, len(path) + 1)}
        # By level, then by path: children of a node are adjacent and in rank order.
        order = sorted(wanted, key=lambda path: (len(path), path))
        number_of = {path: node for node, path in enumerate(order)}
        parents = tuple(number_of.get(path[:-1], -1) for path in order)
        return cls(parents, tuple(path[-1] for path in order))

    def cut(self, depth: int) -> Shape:
        """The first ``depth`` levels."""
        return _cut(self, depth)


@lru_cache(maxsize=256)
def _cut(shape: Shape, depth: int) -> Shape:
    keep = sum(node_depth <= depth for node_depth in depths_of(shape.parents))
    return Shape(shape.parents[:keep], shape.ranks[:keep])


def best_shape(accuracy: Sequence[Sequence[float]], nodes: int) -> Shape:
    """The shape of at most ``nodes`` nodes with the most expected accepted tokens. ``accuracy[d]
    [r]``: chance that candidate r at depth d + 1 is the target's choice, given that its parent is.
    A node's chance is the product along its path, so the best tree is the ``nodes`` likeliest paths
    (Sequoia)."""

    def entry(chance: float, path: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        return (-chance * accuracy[len(path) - 1][path[-1]], path)

    chosen: list[tuple[int, ...]] = []
    heap = [entry(1.0, (0,))] if accuracy and accuracy[0] else []
    above: dict[tuple[int, ...], float] = {(): 1.0}
    while heap and len(chosen) < nodes:
        negative, path = heapq.heappop(heap)
        if not negative:
            break  # all other paths have chance 0
        chosen.append(path)
        above[path] = -negative
        depth = len(path)
        if path[-1] + 1 < len(accuracy[depth - 1]):
            heapq.heappush(heap, entry(above[path[:-1]], (*path[:-1], path[-1] + 1)))
        if depth < len(accuracy) and accuracy[depth]:
            heapq.heappush(heap, entry(-negative, (*path, 0)))
    return Shape.of_paths(chosen)


def merge(
    candidates: Iterable[Sequence[int]], max_nodes: int | None = None, max_branch: int | None = None
) -> tuple[list[int], tuple[int, ...]]:
    """Merge candidates into a trie of at most ``max_nodes`` nodes: its tokens and parents, -1 for
    the root. Every candidate but the first adds at most ``max_branch`` nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for number, candidate in enumerate(candidates):
        node, before = -1, len(tokens)
        for token in candidate:
            child = children.get((node, token))
            if child is None:
                if max_nodes is not None and len(tokens) >= max_nodes:
                    return tokens, tuple(parents)
                if number and max_branch is not None and len(tokens) - before >= max_branch:
                    break
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    return tokens, tuple(parents)

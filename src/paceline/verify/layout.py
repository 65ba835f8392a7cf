"""Which row judges which node: the shape of a batch of trees, known to the host.

The trees' rows of logits follow one another, each tree's root first; its nodes likewise::

    rows   R0 a b c  R1 d e        nodes   a b c d e
    a node's parent row is the row of the law that its token was a candidate for
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from paceline.core.transfer import to_device
from paceline.core.tree import children_of

Shapes = tuple[tuple[int, ...], ...]  # the parents of each tree


@dataclass(frozen=True)
class Layout:
    """Index tensors on the device, int64.

    ``parent_rows`` [N]: row of each node's parent. ``ranks``: for k = 0, 1, ... the rows that have
    a k-th child and those children (nodes), both [n_k]; ``within[k]`` [n_k] says where the rows of
    rank k stand among those of rank k - 1.
    """

    parent_rows: torch.Tensor
    ranks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    within: tuple[torch.Tensor, ...]


@lru_cache(maxsize=4096)
def layout_of(shapes: Shapes, device: torch.device) -> Layout:
    parent_rows: list[int] = []
    ranks: list[tuple[list[int], list[int]]] = []
    row = node = 0
    for parents in shapes:
        parent_rows += [row + 1 + parent for parent in parents]
        for at, children in enumerate(children_of(parents)):
            for rank, child in enumerate(children):
                if rank == len(ranks):
                    ranks.append(([], []))
                ranks[rank][0].append(row + at)
                ranks[rank][1].append(node + child)
        row += 1 + len(parents)
        node += len(parents)
    with torch.inference_mode(False):
        within = []
        for (before, _), (rows, _) in pairwise(ranks):
            place = {at: index for index, at in enumerate(before)}
            within.append(to_device([place[at] for at in rows], device))
        return Layout(
            to_device(parent_rows, device),
            tuple((to_device(rows, device), to_device(nodes, device)) for rows, nodes in ranks),
            (torch.empty(0, dtype=torch.int64, device=device), *within),
        )


@lru_cache(maxsize=4096)
def chain_grid(shapes: Shapes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For chains: nodes as a padded grid, and where each node stands in it.

    Returns int64 ``[B, longest]`` (node at each depth; past a chain's end N, one past the last
    node) and int64 ``[N]`` (index into the flattened grid).
    """
    longest = max(map(len, shapes))
    total = sum(map(len, shapes))
    grid: list[list[int]] = []
    places: list[int] = []
    for chain, parents in enumerate(shapes):
        first = len(places)
        places += [chain * longest + depth for depth in range(len(parents))]
        grid.append([*range(first, len(places)), *[total] * (longest - len(parents))])
    with torch.inference_mode(False):
        return to_device(grid, device), to_device(places, device)

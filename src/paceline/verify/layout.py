"""Which row judges which node: the shape of a batch of trees, known to the host.

The trees' rows of logits follow one another, each tree's root first; its nodes likewise::

    rows   R0 a b c  R1 d e        nodes   a b c d e
    a node's parent row is the row of the distribution that its token was a candidate for
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
            new_index = {at: index for index, at in enumerate(before)}
            within.append(to_device([new_index[at] for at in rows], device))
        return Layout(
            to_device(parent_rows, device),
            tuple((to_device(rows, device), to_device(nodes, device)) for rows, nodes in ranks),
            (torch.empty(0, dtype=torch.int64, device=device), *within),
        )


@dataclass(frozen=True)
class ChainGrid:
    """Chains side by side, one per row, the short ones padded.

    ``nodes`` int64 [B, longest]: 0 beyond a chain's end. ``positions`` int64 [N]: where each node
    stands in the flattened grid. ``ends`` bool [N]: the last node of each chain.
    """

    nodes: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor


@lru_cache(maxsize=4096)
def chain_grid(shapes: Shapes, device: torch.device) -> ChainGrid:
    longest = max(map(len, shapes))
    nodes: list[list[int]] = []
    positions: list[int] = []
    ends: list[bool] = []
    for chain, parents in enumerate(shapes):
        first, length = len(positions), len(parents)
        positions += range(chain * longest, chain * longest + length)
        ends += [depth == length - 1 for depth in range(length)]
        nodes.append([*range(first, first + length), *[0] * (longest - length)])
    with torch.inference_mode(False):
        index = to_device(nodes, device), to_device(positions, device)
        return ChainGrid(*index, to_device(ends, device, torch.bool))

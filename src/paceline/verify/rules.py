"""The lossless rules as pure functions of distributions; nothing is drawn here.

A rule gives every node's probability to be accepted, and every row's distribution of the token that
ends the step there: all that drawing (``verifier.py``) or enumerating (the law tests) needs.

* ``siblings``: a node's chance given that its parent was reached and its earlier siblings were
  refused. Walk down from the root through the first accepted child; without one, the row's stop
  distribution gives the last token. For chains: the token rule of Leviathan, Chen et al. 2023.
* ``block``: independent chances along a chain; the last accepted node counts, past refused ones.

The trees' rows of logits follow one another, each tree's root first; its nodes likewise::

    rows   R0 a b c  R1 d e        nodes   a b c d e
    a node's parent row is the row of the distribution that its token was a candidate for

Distributions are ``[R, V]`` for the target and ``[N, V]`` for the draft, of equal width and dtype;
``aligned`` pads them to equal width.
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
    """Index tensors on the device, int64. ``parent_rows`` [N]: row of each node's parent.
    ``ranks``: for k = 0, 1, ... the rows that have a k-th child, and those children (nodes), both
    [n_k]; ``within[k]`` [n_k]: indices of rank k's rows among those of rank k - 1."""

    parent_rows: torch.Tensor
    ranks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    within: tuple[torch.Tensor, ...]


@lru_cache(maxsize=512)  # 4,096 of 32 trees each held 67 MB
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
    """Chains side by side, one per row, padded. ``nodes`` int64 [B, longest]: 0 beyond a chain's
    end. ``positions`` int64 [N]: each node's index in the flattened grid. ``ends`` bool [N]: the
    last node of each chain."""

    nodes: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor


@lru_cache(maxsize=512)
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


@dataclass(frozen=True)
class RuleProbabilities:
    """``accept`` [N] and ``stop`` [R, V] of nodes and rows."""

    accept: torch.Tensor
    stop: torch.Tensor


def aligned(*distributions: torch.Tensor) -> list[torch.Tensor]:
    """All padded to the greatest width with probability zero."""
    width = max(probs.shape[1] for probs in distributions)
    missing = [(probs, width - probs.shape[1]) for probs in distributions]
    return [torch.nn.functional.pad(p, (0, more)) if more else p for p, more in missing]


def _normalised(
    weights: torch.Tensor, otherwise: torch.Tensor, mass: torch.Tensor | None = None
) -> torch.Tensor:
    """weights / sum(weights) by row; ``otherwise`` where the sum is 0: p equals q there, and such a
    row ends a step through rounding only."""
    if mass is None:
        mass = weights.sum(dim=-1)
    mass = mass.unsqueeze(1)
    empty = (mass <= 0).to(mass.dtype)
    # A sum with zeros, as a `where` over whole rows takes three times as long.
    return torch.addcmul(weights / (mass + empty), otherwise, empty)


def siblings(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, shapes: Shapes
) -> RuleProbabilities:
    """Siblings drawn one after another without replacement (SpecInfer, Sequoia).

    The k-th child x of a row is accepted with min(1, p(x) / q(x)); if refused, p <- norm(max(0, p -
    q)), and q[x] <- 0, renormalised, for the next sibling. All rows at once, one pass per rank.
    ``q[i]``: the distribution before any sibling of node i was drawn. A child beyond q's tokens
    cannot have been drawn: it is refused, and the empty q leaves p as it is."""
    layout = layout_of(shapes, p.device)
    stop = p.clone()
    accept = p.new_zeros(tokens.shape[0])
    draft = q
    for rank, (rows, nodes) in enumerate(layout.ranks):
        # The q of the first child serves all its siblings, less the tokens drawn so far.
        source, index = (q, nodes) if rank == 0 else (draft, layout.within[rank])
        draft = source.index_select(0, index)
        target = stop.index_select(0, rows)
        token = tokens[nodes].unsqueeze(1)
        chance_q = draft.gather(1, token)
        ratio = (target.gather(1, token) / chance_q).clamp_(max=1.0)
        chance = torch.where(chance_q > 0, ratio, 0.0).squeeze(1)
        accept.index_copy_(0, nodes, chance)
        stop.index_copy_(0, rows, _normalised((target - draft).clamp_(min=0.0), target))
        if rank + 1 < len(layout.ranks):
            draft = draft.scatter(1, token, 0.0)
            draft = _normalised(draft, draft)
    return RuleProbabilities(accept, stop)


def block(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, shapes: Shapes
) -> RuleProbabilities:
    """Block verification of independently drawn chains (Sun et al. 2024, arXiv 2403.10444).

    With P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)), and p, q the distributions after node i,
    Z_i = sum max(0, P_i p - q): node i is accepted with h_i = Z_i / (Z_i + 1 - P_i), the last one
    with P_g. Then at least i tokens are accepted with chance P_i, whatever stands behind it: what
    was drawn may say where a chain ends. The stop distribution after node i is norm(max(0, P_i p -
    q)), after the last one p.
    """
    parent_rows = layout_of(shapes, p.device).parent_rows
    grid = chain_grid(shapes, p.device)
    target = p.index_select(0, parent_rows)  # distribution that node i was a candidate for, like q
    token = tokens.unsqueeze(1)
    chance_q = q.gather(1, token)
    ratio = torch.where(chance_q > 0, target.gather(1, token) / chance_q, 0.0).squeeze(1)

    prefix = [p.new_ones(len(shapes))]
    for ratio_at_depth in ratio[grid.nodes].unbind(dim=1):
        prefix.append((prefix[-1] * ratio_at_depth).clamp_(max=1.0))
    before = torch.stack(prefix[:-1], dim=1).flatten()[grid.positions]  # P at each node's parent
    prefix_probs = torch.stack(prefix[1:], dim=1).flatten()[grid.positions]  # P at each node

    weights = (before.unsqueeze(1) * target).sub_(q).clamp_(min=0.0)
    mass = weights.sum(dim=-1)
    stop = p.index_copy(0, parent_rows, _normalised(weights, target, mass))

    # Z after node i is the mass at the next node, which is the next in its chain but for the last.
    following = mass.roll(-1)
    left = following + (1.0 - prefix_probs)  # in this order: the bracket is exact near one
    chances = torch.where(left > 0, following / left, 1.0)
    return RuleProbabilities(torch.where(grid.ends, prefix_probs, chances), stop)

"""The lossless acceptance rules as pure functions of distributions; nothing is sampled here.

A rule computes the acceptance probability of every node, and for every row the stop distribution:
that of the token that ends the step if the walk ends there. ``verifier.py`` samples from these, the
law tests enumerate them.

* ``siblings``: a node's probability is conditional on its parent being accepted and its earlier
  siblings rejected. Walk down from the root to the first accepted child each time; where none is
  accepted, the row's stop distribution (the residual distribution) gives the last token. On chains
  this is the token-by-token rule of Leviathan et al. and Chen et al. 2023.
* ``block``: nodes of a chain are accepted independently; the walk goes to the last accepted node,
  past rejected ones (block verification).

The rows of logits of all trees follow one another, the root of each tree first; so do the nodes::

    rows   R0 a b c  R1 d e        nodes   a b c d e
    the parent row of a node holds the distribution that its token was a candidate for

Distributions are ``[R, V]`` for the target and ``[N, V]`` for the draft, with the same dtype and
width (see ``pad_to_same_width``).
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
    """Index tensors of some trees, int64 on the device. ``parent_rows`` [N]: the parent row of each
    node. ``ranks[k]``: the rows that have a k-th child, and these children (nodes), both [n_k].
    ``within[k]`` [n_k]: indices of the rows of ``ranks[k]`` among those of ``ranks[k - 1]``."""

    parent_rows: torch.Tensor
    ranks: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    within: tuple[torch.Tensor, ...]


@lru_cache(maxsize=512)  # 4,096 of 32 trees each held 67 MB
def layout_of(shapes: Shapes, device: torch.device) -> Layout:
    """The layout of trees of these shapes."""
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
    """Chains as the rows of a padded grid. ``nodes`` int64 [B, longest]: the nodes of each chain,
    padded with 0. ``positions`` int64 [N]: index of each node in the flattened grid. ``ends`` bool
    [N]: whether a node is the last of its chain."""

    nodes: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor


@lru_cache(maxsize=512)
def chain_grid(shapes: Shapes, device: torch.device) -> ChainGrid:
    """The grid of chains of these shapes."""
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
    """``accept`` [N]: acceptance probability of each node. ``stop`` [R, V]: distribution of the
    last token if the walk ends at the row."""

    accept: torch.Tensor
    stop: torch.Tensor


def pad_to_same_width(*distributions: torch.Tensor) -> list[torch.Tensor]:
    """Pad distributions [*, V] with probability zero to the greatest width among them."""
    width = max(probs.shape[1] for probs in distributions)
    missing = [(probs, width - probs.shape[1]) for probs in distributions]
    return [torch.nn.functional.pad(p, (0, more)) if more else p for p, more in missing]


def _normalise(
    weights: torch.Tensor, otherwise: torch.Tensor, mass: torch.Tensor | None = None
) -> torch.Tensor:
    """weights / sum(weights) by row; ``otherwise`` where the sum is 0. There p equals q, so that
    a walk ends at such a row only through rounding."""
    if mass is None:
        mass = weights.sum(dim=-1)
    mass = mass.unsqueeze(1)
    empty = (mass <= 0).to(mass.dtype)
    # A sum with zeros, because torch.where over whole rows takes three times as long.
    return torch.addcmul(weights / (mass + empty), otherwise, empty)


def siblings(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, shapes: Shapes
) -> RuleProbabilities:
    """The rule for siblings that were sampled one after another without replacement (SpecInfer,
    Sequoia).

    Child x of a row is accepted with probability min(1, p(x) / q(x)). If it is rejected, p becomes
    the residual norm(max(0, p - q)), and q[x] becomes 0, renormalised, for the next sibling. All
    rows are computed at once, with one pass for each rank of siblings. ``q[i]``: the draft
    distribution before any sibling of node i was drawn. A child that q gives probability zero
    cannot have been drawn: it is rejected, and where q is empty p stays as it is."""
    layout = layout_of(shapes, p.device)
    stop = p.clone()
    accept = p.new_zeros(tokens.shape[0])
    draft = q
    for rank, (rows, nodes) in enumerate(layout.ranks):
        # All siblings use the q of the first one, without the tokens drawn so far.
        source, index = (q, nodes) if rank == 0 else (draft, layout.within[rank])
        draft = source.index_select(0, index)
        target = stop.index_select(0, rows)
        token = tokens[nodes].unsqueeze(1)
        chance_q = draft.gather(1, token)
        ratio = (target.gather(1, token) / chance_q).clamp_(max=1.0)
        chance = torch.where(chance_q > 0, ratio, 0.0).squeeze(1)
        accept.index_copy_(0, nodes, chance)
        stop.index_copy_(0, rows, _normalise((target - draft).clamp_(min=0.0), target))
        if rank + 1 < len(layout.ranks):
            draft = draft.scatter(1, token, 0.0)
            draft = _normalise(draft, draft)
    return RuleProbabilities(accept, stop)


def block(
    p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, shapes: Shapes
) -> RuleProbabilities:
    """Block verification of chains sampled token by token from q (Sun et al. 2024, arXiv
    2403.10444).

    Let P_0 = 1 and P_i = min(1, P_{i-1} p(x_i) / q(x_i)), and with p, q the distributions after
    node i let Z_i = sum max(0, P_i p - q). Node i is accepted with h_i = Z_i / (Z_i + 1 - P_i), the
    last node with P_g. Then at least i tokens are accepted with probability P_i, whatever follows
    node i; so the drawn tokens may decide where a chain ends. The stop distribution after node i is
    norm(max(0, P_i p - q)), after the last node p.
    """
    parent_rows = layout_of(shapes, p.device).parent_rows
    grid = chain_grid(shapes, p.device)
    target = p.index_select(0, parent_rows)  # row i: p where node i was a candidate, as for q
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
    stop = p.index_copy(0, parent_rows, _normalise(weights, target, mass))

    # Z after node i is the mass at the next node of its chain. (Last nodes are handled below.)
    following = mass.roll(-1)
    total = following + (1.0 - prefix_probs)  # in this order, as the bracket is exact near one
    chances = torch.where(total > 0, following / total, 1.0)
    return RuleProbabilities(torch.where(grid.ends, prefix_probs, chances), stop)

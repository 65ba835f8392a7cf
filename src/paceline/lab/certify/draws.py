"""Does a drafter draw from the distribution that it declares? If not, no rule can be lossless.

Every sampled node's token is turned into a number by the declared distribution's cumulative
function, randomised within its step: honest draws give independent uniform numbers, whatever the
distributions. Tokens are ordered from the likeliest down, so that a wrong temperature, an argmax in
place of a draw, or dropping unlikely nodes all push the numbers to one side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from paceline.core.batch import Plan
from paceline.core.tree import Draw, TokenTree, children_of
from paceline.draft.base import Drafter
from paceline.lab.certify.cells import String
from paceline.lab.certify.chisquare import ChiSquare, goodness

_BINS = 20
_MOST_DISTRIBUTIONS = 256


class Recorder:
    """Stands in for a drafter and takes notes of what it proposes. Changes nothing.

    ``counts``: how many draws fell into each twentieth of the declared distribution; ``impossible``
    ones had no chance under it.
    """

    def __init__(self, drafter: Drafter, seed: int = 0) -> None:
        self._drafter = drafter
        self._generator = torch.Generator().manual_seed(seed)
        self.counts = [0] * _BINS
        self.impossible = 0  # drawn although the declared distribution gives them no chance
        # Of the request whose tokens these are: what was drafted and declared after it.
        self.watched: tuple[int, ...] | None = None
        self._beyond = False
        self.distributions: dict[String, torch.Tensor] = {}
        self.trees: dict[tuple[tuple[int, ...], Draw], TokenTree] = {}

    def watch(self, tokens: Sequence[int] | None, *, beyond: bool = False) -> None:
        """Keep the distributions and trees proposed after exactly these tokens; forget earlier
        ones. ``beyond``: after the first request's that begins with them and is drafted for."""
        self.watched, self._beyond = None if tokens is None else tuple(tokens), beyond
        self.distributions, self.trees = {}, {}

    def resume(self, counts: Sequence[int], impossible: int) -> None:
        """Go on from what another recorder of this drafter had counted."""
        self.counts, self.impossible = list(counts) or [0] * _BINS, impossible

    @property
    def drawn(self) -> int:
        return sum(self.counts) + self.impossible

    def honesty(self) -> ChiSquare | None:
        """Test of the draws so far; None if nothing was drawn."""
        if not sum(self.counts):
            return None
        return goodness(self.counts, [1 / _BINS] * _BINS)

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = self._drafter.propose(plan)
        for item, tree in zip(plan.slices, trees, strict=True):
            watching = len(tree) and self.watched is not None
            if watching and self._is_watched(tuple(item.seq.tokens)):
                self._note(tree)
        sampled = [tree for tree in trees if len(tree) and tree.draw is not Draw.POINT]
        if sampled:
            self._count(sampled)
        return trees

    def _is_watched(self, tokens: tuple[int, ...]) -> bool:
        if (
            self._beyond
            and self.watched is not None
            and tokens[: len(self.watched)] == self.watched
        ):
            self.watched, self._beyond = tokens, False
        return tokens == self.watched

    def _note(self, tree: TokenTree) -> None:
        self.trees.setdefault((tree.parents, tree.draw), tree)
        if tree.q is None:
            return
        tokens = tree.tokens.tolist()
        paths: list[String] = []
        for node, parent in enumerate(tree.parents):
            above = paths[parent] if parent >= 0 else ()
            paths.append((*above, tokens[node]))
            # Deeper ones are all different: they would only take memory.
            if (
                len(above) <= 1
                and above not in self.distributions
                and len(self.distributions) < _MOST_DISTRIBUTIONS
            ):
                self.distributions[above] = tree.q[node].cpu().clone()

    def _count(self, trees: Sequence[TokenTree]) -> None:
        width = max(tree.q.shape[1] for tree in trees if tree.q is not None)
        pad = torch.nn.functional.pad
        probs = torch.cat(
            [pad(t.q, (0, width - t.q.shape[1])) for t in trees if t.q is not None]
        ).to("cpu", torch.float64)
        tokens = torch.cat([tree.tokens for tree in trees]).cpu()
        _remove_earlier_siblings(probs, tokens, trees)
        mass = probs.sum(-1)
        token_probs = probs.gather(1, tokens[:, None])
        # A distribution that has run out of tokens says nothing about the next sibling.
        counts = mass > 0
        self.impossible += int((counts & (token_probs[:, 0] <= 0)).sum())
        above = (probs * (probs > token_probs)).sum(-1)
        equal = (probs * (probs == token_probs)).sum(-1)
        noise = torch.rand(len(tokens), dtype=torch.float64, generator=self._generator)
        places = ((above + noise * equal) / mass)[counts & (token_probs[:, 0] > 0)]
        histogram = torch.bincount((places * _BINS).long().clamp(max=_BINS - 1), minlength=_BINS)
        self.counts = [a + b for a, b in zip(self.counts, histogram.tolist(), strict=True)]

    def __getattr__(self, name: str) -> Any:
        """The rest of the protocol is the drafter's own."""
        return getattr(self._drafter, name)


def _remove_earlier_siblings(
    probs: torch.Tensor, tokens: torch.Tensor, trees: Sequence[TokenTree]
) -> None:
    """What a sibling is drawn from no longer holds those drawn before it."""
    rows: list[int] = []
    earlier: list[int] = []
    first = 0
    for tree in trees:
        for node, before in _sibling_pairs(tree.parents):
            rows.append(first + node)
            earlier.append(first + before)
        first += len(tree)
    if rows:
        probs[torch.tensor(rows), tokens[torch.tensor(earlier)]] = 0.0


@lru_cache(maxsize=1024)
def _sibling_pairs(parents: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(node, earlier sibling) for every such pair."""
    return tuple(
        (node, before)
        for siblings in children_of(parents)
        for rank, node in enumerate(siblings)
        for before in siblings[:rank]
    )

"""Does a drafter draw from the distribution that it declares? And examples of what it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch.nn.functional import pad

from paceline.core.batch import Plan
from paceline.core.tree import Draw, TokenTree, children_of
from paceline.draft.base import Drafter
from paceline.lab.certify.chisquare import ChiSquare, goodness
from paceline.lab.certify.decoding import String

_BINS = 20

Examples = dict[
    Draw, tuple[String, TokenTree]
]  # a tree, and the tokens that it was proposed behind


@dataclass
class DrawCounts:
    """Draws in each twentieth of the declared distribution; ``impossible``: without a chance."""

    counts: list[int] = field(default_factory=lambda: [0] * _BINS)
    impossible: int = 0

    @property
    def total(self) -> int:
        return sum(self.counts) + self.impossible

    def test(self) -> ChiSquare | None:
        """Whether the draws so far are from the declared distributions; None without any."""
        return goodness(self.counts, [1 / _BINS] * _BINS) if sum(self.counts) else None


class Recorder:
    """Stands in for a drafter and counts what it draws. ``examples``: the largest trees."""

    def __init__(self, drafter: Drafter, draws: DrawCounts, seed: int = 0) -> None:
        self._drafter, self._draws = drafter, draws
        self._generator = torch.Generator().manual_seed(seed)
        self.examples: Examples = {}

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = self._drafter.propose(plan)
        for item, tree in zip(plan.slices, trees, strict=True):
            known = self.examples.get(tree.draw)
            if len(tree) > (0 if known is None else len(known[1])):
                # Drafters write to the same memory again.
                q = None if tree.q is None else tree.q.cpu().clone()
                kept = replace(tree, tokens=tree.tokens.cpu().clone(), q=q)
                self.examples[tree.draw] = tuple(item.seq.tokens), kept
        sampled = [tree for tree in trees if len(tree) and tree.draw is not Draw.POINT]
        if sampled:
            self._count(sampled)
        return trees

    def __getattr__(self, name: str) -> Any:
        """The rest of the protocol is the drafter's own."""
        return getattr(self._drafter, name)

    def _count(self, trees: Sequence[TokenTree]) -> None:
        declared = [tree.q for tree in trees if tree.q is not None]
        width = max(q.shape[1] for q in declared)
        probs = torch.cat([pad(q, (0, width - q.shape[1])) for q in declared])
        probs = probs.to("cpu", torch.float64)
        tokens = torch.cat([tree.tokens for tree in trees]).cpu()
        first = 0
        for tree in trees:  # what a sibling is drawn from no longer holds those drawn before it
            for siblings in children_of(tree.parents):
                for before, node in combinations(siblings, 2):
                    probs[first + node, tokens[first + before]] = 0.0
            first += len(tree)
        mass, token_probs = probs.sum(-1), probs.gather(1, tokens[:, None])
        # A distribution that has run out of tokens says nothing about the next sibling.
        possible, counts = token_probs[:, 0] > 0, mass > 0
        self._draws.impossible += int((counts & ~possible).sum())
        above = (probs * (probs > token_probs)).sum(-1)
        equal = (probs * (probs == token_probs)).sum(-1)
        noise = torch.rand(len(tokens), dtype=torch.float64, generator=self._generator)
        ranks = ((above + noise * equal) / mass)[counts & possible]
        for index in (ranks * _BINS).long().clamp(max=_BINS - 1).tolist():
            self._draws.counts[index] += 1

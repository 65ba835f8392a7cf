"""Does a drafter draw from the distribution that it declares? If so, the cumulative function,
randomised within its step, makes uniform numbers of the draws. Tokens are ordered from the
likeliest down: a wrong temperature, or an argmax, pushes the numbers to one side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
_MOST_DISTRIBUTIONS = 256


@dataclass
class DrawCounts:
    """How many draws fell into each twentieth of the declared distribution. ``impossible`` ones had
    no chance under it."""

    counts: list[int] = field(default_factory=lambda: [0] * _BINS)
    impossible: int = 0

    @property
    def total(self) -> int:
        return sum(self.counts) + self.impossible

    def test(self) -> ChiSquare | None:
        """Whether the draws so far are from the declared distributions; None without any."""
        return goodness(self.counts, [1 / _BINS] * _BINS) if sum(self.counts) else None


class Recorder:
    """Stands in for a drafter and counts what it draws. ``trees`` and ``distributions`` (after the
    root, and after first tokens) were proposed and declared behind the ``watched`` tokens."""

    def __init__(self, drafter: Drafter, draws: DrawCounts, seed: int = 0) -> None:
        self._drafter, self._draws = drafter, draws
        self._generator = torch.Generator().manual_seed(seed)
        self.watch(None)

    def watch(self, tokens: String | None) -> None:
        """From now on keep what is proposed after the tokens of the first request that begins with
        these and is drafted for."""
        self.watched, self._beyond = tokens, True
        self.distributions: dict[String, torch.Tensor] = {}
        self.trees: dict[tuple[tuple[int, ...], Draw], TokenTree] = {}

    def propose(self, plan: Plan) -> list[TokenTree]:
        trees = self._drafter.propose(plan)
        for item, tree in zip(plan.slices, trees, strict=True):
            if self.watched is not None and len(tree):
                self._note(self.watched, tuple(item.seq.tokens), tree)
        sampled = [tree for tree in trees if len(tree) and tree.draw is not Draw.POINT]
        if sampled:
            self._count(sampled)
        return trees

    def __getattr__(self, name: str) -> Any:
        """The rest of the protocol is the drafter's own."""
        return getattr(self._drafter, name)

    def _note(self, watched: String, tokens: String, tree: TokenTree) -> None:
        if self._beyond and tokens[: len(watched)] == watched:
            self.watched = watched = tokens
            self._beyond = False
        if tokens != watched:
            return
        self.trees.setdefault((tree.parents, tree.draw), tree)
        if tree.q is None:
            return
        drafted = tree.tokens.tolist()
        for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
            above = () if parent < 0 else (drafted[parent],)
            # Deeper ones are all different: they would only take memory.
            if depth <= 2 and len(self.distributions) < _MOST_DISTRIBUTIONS:
                self.distributions.setdefault(above, tree.q[node].cpu().clone())

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

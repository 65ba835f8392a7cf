"""Records what a drafter proposes: whether its tokens follow the distribution that it declares
(``TokenTree.q``), and an example tree of each ``Draw`` for the exact check of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch.nn.functional import pad

from paceline.core.batch import Plan
from paceline.core.tree import Draw, TokenTree, children_of
from paceline.lab.certify.chisquare import ChiSquare, goodness_of_fit
from paceline.lab.certify.decoding import TokenIds

_BINS = 20

# The largest tree seen of each kind, with the tokens of the sequence that it was proposed for.
Examples = dict[Draw, tuple[TokenIds, TokenTree]]


class DraftRecorder:
    """Counts the tokens that a drafter samples over their randomized rank in the distribution that
    it declares, in ``_BINS`` bins of equal probability: uniform if it samples from what it
    declares. ``impossible`` counts tokens whose declared probability is 0."""

    def __init__(self, seed: int = 0) -> None:
        self.counts = [0] * _BINS
        self.impossible = 0
        self._generator = torch.Generator().manual_seed(seed)

    @property
    def total(self) -> int:
        return sum(self.counts) + self.impossible

    def test(self) -> ChiSquare | None:
        """Chi-square test that the histogram is uniform; None if nothing was drawn."""
        return goodness_of_fit(self.counts, [1 / _BINS] * _BINS) if sum(self.counts) else None

    def record(self, examples: Examples, plan: Plan, trees: Sequence[TokenTree]) -> None:
        """Count the tokens of ``trees`` and keep the largest in ``examples``."""
        for item, tree in zip(plan.slices, trees, strict=True):
            example = examples.get(tree.draw)
            if len(tree) > (0 if example is None else len(example[1])):
                # A copy, because drafters reuse the memory of their trees.
                q = None if tree.q is None else tree.q.cpu().clone()
                copied = replace(tree, tokens=tree.tokens.cpu().clone(), q=q)
                examples[tree.draw] = tuple(item.seq.tokens), copied
        sampled = [tree for tree in trees if len(tree) and tree.draw is not Draw.POINT]
        if sampled:
            self._count(sampled)

    def _count(self, trees: Sequence[TokenTree]) -> None:
        """Add the nodes of sampled trees to the histogram. A token's rank is the probability of
        all likelier tokens plus a random share of its own (and equal) probability."""
        declared = [tree.q for tree in trees if tree.q is not None]
        width = max(q.shape[1] for q in declared)
        probs = torch.cat([pad(q, (0, width - q.shape[1])) for q in declared])
        probs = probs.to("cpu", torch.float64)
        tokens = torch.cat([tree.tokens for tree in trees]).cpu()
        first_row = 0
        for tree in trees:  # siblings are drawn without replacement
            for siblings in children_of(tree.parents):
                for earlier, node in combinations(siblings, 2):
                    probs[first_row + node, tokens[first_row + earlier]] = 0.0
            first_row += len(tree)
        mass, token_probs = probs.sum(-1), probs.gather(1, tokens[:, None])
        # Where the earlier siblings took all the probability, any token is right: not counted.
        possible, counted = token_probs[:, 0] > 0, mass > 0
        self.impossible += int((counted & ~possible).sum())
        above = (probs * (probs > token_probs)).sum(-1)
        equal = (probs * (probs == token_probs)).sum(-1)
        noise = torch.rand(len(tokens), dtype=torch.float64, generator=self._generator)
        ranks = ((above + noise * equal) / mass)[counted & possible]
        for index in (ranks * _BINS).long().clamp(max=_BINS - 1).tolist():
            self.counts[index] += 1

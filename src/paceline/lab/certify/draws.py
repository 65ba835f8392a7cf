"""Records what a drafter proposes: whether its tokens follow the distribution that it declares
(``TokenTree.q``), and an example tree of each ``Draw`` for the exact check of the rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.batch import Plan
from paceline.core.tree import Draw, TokenTree, children_of
from paceline.lab.certify.chisquare import RankCounts
from paceline.lab.certify.decoding import TokenIds

# The largest tree seen of each kind, with the tokens of the sequence that it was proposed for.
Examples = dict[Draw, tuple[TokenIds, TokenTree]]


def record(ranks: RankCounts, examples: Examples, plan: Plan, trees: Sequence[TokenTree]) -> None:
    """Count the sampled tokens of ``trees`` in ``ranks``, by the distributions that they declare,
    and keep the largest tree of each kind in ``examples``."""
    for item, proposed in zip(plan.slices, trees, strict=True):
        # A copy, because drafters reuse the memory of their trees.
        q = None if proposed.q is None else proposed.q.cpu().clone()
        tree = replace(proposed, tokens=proposed.tokens.cpu().clone(), q=q)
        example = examples.get(tree.draw)
        if len(tree) > (0 if example is None else len(example[1])):
            examples[tree.draw] = tuple(item.seq.tokens), tree
        if q is None or tree.draw is Draw.POINT:
            continue
        for siblings in children_of(tree.parents):
            for rank, node in enumerate(siblings):  # drawn without replacement
                probs = q[node].clone()
                probs[tree.tokens[list(siblings[:rank])]] = 0.0
                # Where the earlier siblings took all the probability, any token is right.
                if probs.sum() > 0:
                    ranks.add(probs, [int(tree.tokens[node])])

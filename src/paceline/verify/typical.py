"""Typical acceptance, which is NOT lossless: drafts are accepted if the target finds them
plausible.

Cai et al. 2024 (Medusa, arXiv 2401.10774), section 3.3.1: a drafted token x is accepted when

    p(x) > min(epsilon, delta * exp(-H(p)))

with p the target's distribution and H its entropy. Of the accepted paths the longest wins, of
equally long ones the likeliest; the token after it is drawn from p. Only for ``lossy=True``;
outputs say so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.batch import Span
from paceline.core.draws import choose
from paceline.core.sampling import Rows, probs_of_scores
from paceline.verify.rules import Shapes, layout_of
from paceline.verify.verifier import Decisions, Judged, Verifier, matching

# The paper's: delta is the square root of epsilon.
EPSILON, DELTA = 0.09, 0.3
_PER_NAT = 1 << 20  # the transfer is of integers


def surprise(p: torch.Tensor, tokens: torch.Tensor, shapes: Shapes) -> torch.Tensor:
    """int64 [N]: -log p(x) of every accepted node in 2^-20 nats, -1 for a refused one.
    Distributions p [R, V] and nodes as in ``rules.py``."""
    above = p.index_select(0, layout_of(shapes, p.device).parent_rows)
    chance = above.gather(1, tokens.unsqueeze(1)).squeeze(1)
    entropy = torch.special.entr(above).sum(dim=-1)
    threshold = (DELTA * torch.exp(-entropy)).clamp_(max=EPSILON)
    cost = (-chance.clamp(min=1e-38).log() * _PER_NAT).round().to(torch.int64)
    return torch.where(chance > threshold, cost, -1)


def longest(parents: tuple[int, ...], surprises: Sequence[int]) -> tuple[int, ...]:
    """The longest path of accepted nodes; the least surprising one of equals."""
    paths: dict[int, tuple[tuple[int, ...], int]] = {-1: ((), 0)}  # with their surprise
    for node, (parent, surprise_of_node) in enumerate(zip(parents, surprises, strict=True)):
        if parent in paths and surprise_of_node >= 0:
            path, cost = paths[parent]
            paths[node] = (*path, node), cost + surprise_of_node
    return max(paths.values(), key=lambda entry: (len(entry[0]), -entry[1]))[0]


class TypicalVerifier(Verifier):
    """Judges sampled requests by typical acceptance, greedy ones exactly. Seeded requests draw the
    token that ends a step with their own noise, so a seed repeats a text; but the text depends on
    the drafter."""

    lossy = True

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__("auto", generator)

    def _decide(self, scores: torch.Tensor, rows: Rows, spans: Sequence[Span]) -> Decisions:
        probs = probs_of_scores(scores, [seq.params for seq in rows.seqs])
        choices = choose(probs, rows, self.generator)
        drafted = [span.tree.tokens for span in spans if len(span.tree)]
        if not drafted:
            return Decisions(choices)
        # Drafted ids beyond the target's logits are refused.
        tokens = torch.cat(drafted)
        known = tokens < probs.shape[1]
        shapes = tuple(span.tree.parents for span in spans)
        surprises = surprise(probs, tokens * known, shapes)
        return Decisions(choices, torch.where(known, surprises, -1))

    def _path(self, span: Span, judged: Judged) -> tuple[int, ...]:
        if span.seq.params.greedy:
            return matching(span.tree.parents, judged.tokens, judged.choices)
        return longest(span.tree.parents, judged.accepted)

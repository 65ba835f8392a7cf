"""Unseeded samples against the target's own distributions: chi-square tests of short texts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.lab.certify.certificate import DistributionTest
from paceline.lab.certify.chisquare import ChiSquare, goodness, homogeneity
from paceline.lab.certify.decoding import String
from paceline.lab.certify.evidence import Prefix
from paceline.lab.certify.scoring import Scorer
from paceline.model.target import CausalModel

DEPTH = 3  # tokens of a sample
_MOST_CELLS = 150
_LEAST_EXPECTED = 5.0  # samples in a cell, the usual rule for chi-square
_MOST_HEADS = 128  # beginnings whose next tokens are tested: those that occur most
# Next tokens are counted by how likely they were: first, second, third, fourth or fifth, ...
_RANKS = torch.tensor([0, 1, 2, 4, 8, 16, 64])
# Either sample may differ from the scored distribution by what two batch shapes differ by.
_MARGIN = 2.0


@dataclass(frozen=True)
class Cells:
    """A cell for each of some ``groups`` of tokens, and one for all others, with their ``chances``.
    ``slack`` is the effect size w² that a test allows for rounding, ``rounding`` the total
    variation between the distributions of two batch shapes."""

    groups: list[int]
    chances: list[float]
    slack: float
    rounding: float

    @classmethod
    def of(cls, probs: torch.Tensor, moved: torch.Tensor, samples: int) -> Cells:
        """So likely that enough of the samples are expected in each; [vocab] in both shapes."""
        least = max(_LEAST_EXPECTED / samples, 1 / _MOST_CELLS)
        order = probs.argsort(descending=True, stable=True)
        groups = order[probs[order] >= least].tolist()
        if groups and 1 - float(probs[groups].double().sum()) < least:
            groups.pop()  # too little is left for a cell: it takes the last of them in
        both = [row[groups].double().tolist() for row in (probs, moved)]
        chances, others = ([*named, max(0.0, 1 - sum(named))] for named in both)
        pairs = list(zip(chances, others, strict=True))
        effect = sum((a - b) ** 2 / a for a, b in pairs if a > 0)
        return cls(groups, chances, _MARGIN**2 * effect, sum(abs(a - b) for a, b in pairs) / 2)

    def counts(self, drawn: Counter[int]) -> list[int]:
        named = [drawn[group] for group in self.groups]
        return [*named, drawn.total() - sum(named)]

    def fit(self, drawn: Counter[int]) -> ChiSquare:
        return goodness(self.counts(drawn), self.chances, self.slack)


def judge(model: CausalModel, prefix: Prefix) -> list[DistributionTest]:
    """Tests of what was drawn with drafts and, as a control, plainly; distributions are scored
    afresh. None where nothing is left to chance."""
    scorer, tests = Scorer(model, prefix.start), list[DistributionTest]()
    plain = Counter(string[0] for string in prefix.plain)
    (probs,), (moved,) = scorer.at_once([()]), scorer.stepwise([()])
    cells = Cells.of(probs, moved, min(len(prefix.drawn), len(prefix.plain)))
    for length, strings in ((prefix.length, prefix.drawn), (0, prefix.plain)):
        first = Counter(string[0] for string in strings)
        fits = {"first token / distribution": (cells.fit(first), cells)}
        if length:
            same = homogeneity(cells.counts(first), cells.counts(plain), cells.slack)
            fits["first token / plain"] = same, cells
        fits["next tokens / distribution"] = _next_tokens(scorer, strings)
        part, where = "sampling" if length else "plain sampling", (prefix.start.name, length)
        for what, (outcome, used) in fits.items():
            if outcome.df > 0:
                about = len(strings), outcome, *where, used.rounding
                tests.append(DistributionTest(part, what, *about))
    return tests


def _next_tokens(scorer: Scorer, strings: Sequence[String]) -> tuple[ChiSquare, Cells]:
    """Test of how likely the tokens behind the first were.

    Beginnings are too many to be tested one by one; so of all together the ranks of the tokens
    are counted, each in the distribution behind its own beginning. Which beginnings occur most
    depends on what came before the tokens, so it favours nothing.
    """
    following: defaultdict[String, Counter[int]] = defaultdict(Counter)
    for string in strings:
        for position in range(1, DEPTH):
            following[string[:position]][string[position]] += 1
    heads = sorted(following, key=lambda head: -following[head].total())[:_MOST_HEADS]
    drawn: Counter[int] = Counter()
    expected = torch.zeros(2, len(_RANKS) + 1, dtype=torch.float64)  # in both batch shapes
    rows = zip(heads, scorer.at_once(heads), scorer.stepwise(heads), strict=True)
    for head, *shapes in rows:
        ranks = shapes[0].argsort(descending=True, stable=True).argsort()
        groups = torch.bucketize(ranks, _RANKS)
        for token, count in following[head].items():
            drawn[int(groups[token])] += count
        both = torch.stack(shapes).double() * following[head].total()
        expected.index_add_(1, groups, both)
    probs, moved = expected / drawn.total()
    cells = Cells.of(probs, moved, drawn.total())
    return cells.fit(drawn), cells

"""Chi-square tests: of tokens by their rank in the distribution that they should follow, and of two
samples."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

POWER = 0.9  # probability with which a test detects its smallest bias
_MIN_EXPECTED = 5.0
# Upper edges of the bins in which tokens are counted by rank: 0, 1, 2, 3-4, 5-8, ...
_EDGES = (0, 1, 2, 4, 8, 16, 64)
BINS = len(_EDGES) + 1


@dataclass(frozen=True)
class ChiSquare:
    """The outcome of a test of that many ``samples``."""

    statistic: float
    df: int
    samples: float

    @property
    def p_value(self) -> float:
        halves = torch.tensor([self.df, self.statistic], dtype=torch.float64) / 2
        return float(torch.special.gammaincc(*halves)) if self.df > 0 else 1.0

    def smallest_bias(self, alpha: float) -> float:
        """The total variation distance over the cells that a test at level ``alpha`` detects with
        probability ``POWER``. A bias d has the effect w² = sum d²/p >= (sum |d|)² = 4 TV²
        (Cauchy-Schwarz), and the non-centrality n w². The critical value is Wilson and Hilferty's
        (1931), and the non-central distribution is taken as normal."""
        if not self.df:
            return 1.0
        normal, spread = NormalDist(), 2 / (9 * self.df)
        critical = self.df * (1 - spread + normal.inv_cdf(1 - alpha) * math.sqrt(spread)) ** 3
        quantile = normal.inv_cdf(POWER)
        root = 2 * quantile + math.sqrt(4 * quantile**2 + 4 * critical - 2 * self.df)
        effect = (root**2 - 2 * self.df) / 4 / self.samples
        return min(1.0, math.sqrt(effect) / 2)


def homogeneity(left: Sequence[int], right: Sequence[int]) -> ChiSquare:
    """Test that two samples come from the same distribution. Cells empty in both are left out."""
    m, n = sum(left), sum(right)
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a + b]
    statistic = sum((a * n - b * m) ** 2 / (m * n * (a + b)) for a, b in pairs)
    return ChiSquare(statistic, len(pairs) - 1, m * n / (m + n))


class RankCounts:
    """Counts tokens by their rank in the distribution that they should follow (the likeliest, the
    second, ...), in ``BINS`` bins of ranks, beside how many were expected in each. ``impossible``
    of them had probability 0."""

    def __init__(self) -> None:
        self.counts = [0] * BINS
        self.expected = torch.zeros(BINS, dtype=torch.float64)
        self.impossible = 0

    @property
    def total(self) -> int:
        return sum(self.counts)

    def add(self, probs: torch.Tensor, tokens: Sequence[int]) -> None:
        """Count ``tokens`` that should come from the distribution ``probs`` [vocab], which need not
        be normalized."""
        top = probs.double().topk(min(_EDGES[-1] + 1, len(probs)))
        bins = [bisect_left(_EDGES, rank) for rank in range(len(top.indices))]
        shares = torch.zeros(BINS, dtype=torch.float64)
        shares.index_add_(0, torch.tensor(bins), top.values / probs.double().sum())
        shares[-1] += 1 - shares.sum()
        self.expected += len(tokens) * shares
        bin_of = dict(zip(top.indices.tolist(), bins, strict=True))
        for token in tokens:
            self.counts[bin_of.get(token, BINS - 1)] += 1
            self.impossible += not probs[token] > 0

    def test(self) -> ChiSquare:
        """Pearson's test of the counts. Bins in which fewer than 5 are expected share a cell, the
        usual rule."""
        cells, cell = list[torch.Tensor](), torch.zeros(2, dtype=torch.float64)
        for pair in zip(self.counts, self.expected.tolist(), strict=True):
            cell = cell + torch.tensor(pair, dtype=torch.float64)
            if cell[1] >= _MIN_EXPECTED:
                cells.append(cell)
                cell = torch.zeros(2, dtype=torch.float64)
        if not cells:
            return ChiSquare(0.0, 0, self.total)
        cells[-1] = cells[-1] + cell
        counts, expected = torch.stack(cells).T
        statistic = float(((counts - expected) ** 2 / expected).sum())
        return ChiSquare(statistic, len(cells) - 1, self.total)

"""Chi-square tests and their power. The non-central chi-square distribution is computed as a
Poisson mixture of central ones (Johnson, Kotz and Balakrishnan 1995, chapter 29); terms below 1e-15
are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def upper_tail(statistic: float, df: int, noncentrality: float = 0.0) -> float:
    """P(X >= statistic) for X chi-square with ``df`` degrees of freedom."""
    if statistic <= 0:
        return 1.0
    half = noncentrality / 2
    spread = 9 * math.sqrt(half) + 40
    terms = torch.arange(max(0, int(half - spread)), int(half + spread), dtype=torch.float64)
    if not half:
        terms = terms[:1]
    weights = torch.exp(torch.xlogy(terms, torch.tensor(half)) - half - torch.lgamma(terms + 1))
    above = torch.special.gammaincc(df / 2 + terms, torch.full_like(terms, statistic / 2))
    return min(1.0, float((weights * above).sum()))


def critical_value(alpha: float, df: int, noncentrality: float = 0.0) -> float:
    """The value that the statistic exceeds with probability ``alpha``."""
    return _root(lambda x: upper_tail(x, df, noncentrality) - alpha)


def detectable_noncentrality(
    alpha: float, power: float, df: int, null_noncentrality: float = 0.0
) -> float:
    """The non-centrality that a test at level ``alpha`` detects with probability ``power``, if the
    null hypothesis includes non-centralities up to ``null_noncentrality``."""
    limit = critical_value(alpha, df, null_noncentrality)
    return _root(lambda value: power - upper_tail(limit, df, value))


def _root(decreasing: Callable[[float], float]) -> float:
    """The root of a decreasing function on [0, infinity), by bisection."""
    low, high = 0.0, 1.0
    while decreasing(high) > 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return high


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for multiple tests (Holm 1979): compare each with the family's alpha."""
    if not p_values:
        return []
    ascending, order = torch.tensor(p_values, dtype=torch.float64).sort()
    stepped = (ascending * torch.arange(len(p_values), 0, -1)).clamp(max=1.0).cummax(0).values
    return [float(p) for p in stepped[order.argsort()]]


@dataclass(frozen=True)
class ChiSquare:
    """Outcome of a test. The non-centrality of an effect w² is ``effective_samples`` times w²;
    ``p_value`` is computed at ``null_noncentrality``, which rounding alone may cause."""

    statistic: float
    df: int
    p_value: float
    effective_samples: float
    null_noncentrality: float

    @classmethod
    def of(
        cls, statistic: float, df: int, effective_samples: float, rounding_effect: float
    ) -> ChiSquare:
        """``rounding_effect``: the effect w² that rounding may cause."""
        allowed = effective_samples * rounding_effect
        p_value = upper_tail(statistic, df, allowed) if df > 0 else 1.0
        return cls(statistic, df, p_value, effective_samples, allowed)

    def smallest_bias(self, alpha: float, power: float = 0.9) -> float:
        """The total variation distance over the cells that a test at level ``alpha`` detects with
        at least ``power``. A bias d has the effect w² = sum d²/p >= (sum |d|)² = 4 TV²
        (Cauchy-Schwarz)."""
        effect = detectable_noncentrality(alpha, power, self.df, self.null_noncentrality)
        return min(1.0, math.sqrt(effect / self.effective_samples) / 2)


def goodness_of_fit(
    observed: Sequence[int], probs: Sequence[float], rounding_effect: float = 0.0
) -> ChiSquare:
    """Pearson's test that ``observed`` counts follow the ``probs`` of the cells."""
    total = sum(observed)
    pairs = zip(observed, probs, strict=True)
    statistic = sum((count - total * prob) ** 2 / (total * prob) for count, prob in pairs)
    return ChiSquare.of(statistic, len(probs) - 1, float(total), rounding_effect)


def homogeneity(left: Sequence[int], right: Sequence[int]) -> ChiSquare:
    """Test that two samples come from the same distribution. Cells empty in both are left out."""
    m, n = sum(left), sum(right)
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a + b]
    statistic = sum((a * n - b * m) ** 2 / (m * n * (a + b)) for a, b in pairs)
    return ChiSquare.of(statistic, len(pairs) - 1, m * n / (m + n), rounding_effect=0.0)

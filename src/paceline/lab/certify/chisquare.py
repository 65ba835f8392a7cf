"""Chi-square tests with their power. The tail of the non-central distribution is a Poisson mixture
of central ones (Johnson, Kotz and Balakrishnan 1995, chapter 29), but for terms below 1e-15."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


def tail(statistic: float, df: int, noncentrality: float = 0.0) -> float:
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


def critical(alpha: float, df: int, noncentrality: float = 0.0) -> float:
    """The statistic that is exceeded with probability ``alpha``."""
    return _solve(lambda x: tail(x, df, noncentrality) - alpha)


def detectable(alpha: float, power: float, df: int, allowed: float = 0.0) -> float:
    """The non-centrality that a test finds with probability ``power``. Under one of ``allowed`` it
    still holds its ``alpha``."""
    limit = critical(alpha, df, allowed)
    return _solve(lambda value: power - tail(limit, df, value))


def _solve(falling: Callable[[float], float]) -> float:
    """The zero of a falling function on [0, infinity)."""
    low, high = 0.0, 1.0
    while falling(high) > 0:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return high


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): compare each with the family's alpha."""
    if not p_values:
        return []
    ascending, order = torch.tensor(p_values, dtype=torch.float64).sort()
    stepped = (ascending * torch.arange(len(p_values), 0, -1)).clamp(max=1.0).cummax(0).values
    return [float(p) for p in stepped[order.argsort()]]


@dataclass(frozen=True)
class ChiSquare:
    """``weight`` turns an effect w² into a non-centrality. ``allowed``: the non-centrality that
    rounding explains, under which ``p_value`` is."""

    statistic: float
    df: int
    p_value: float
    weight: float
    allowed: float

    @classmethod
    def of(cls, statistic: float, df: int, weight: float, slack: float) -> ChiSquare:
        """``slack``: the w² that rounding may cause."""
        allowed = weight * slack
        p_value = tail(statistic, df, allowed) if df > 0 else 1.0
        return cls(statistic, df, p_value, weight, allowed)

    def smallest_bias(self, alpha: float, power: float = 0.9) -> float:
        """Total variation over the cells that is found with ``power`` or more, at level ``alpha``:
        a bias d has the effect w² = sum d²/p >= (sum |d|)² = 4 TV² (Cauchy and Schwarz)."""
        effect = detectable(alpha, power, self.df, self.allowed)
        return min(1.0, math.sqrt(effect / self.weight) / 2)


def goodness(observed: Sequence[int], chances: Sequence[float], slack: float = 0.0) -> ChiSquare:
    """Do counts follow these chances (Pearson)? ``slack`` as of ``ChiSquare.of``."""
    count = sum(observed)
    pairs = zip(observed, chances, strict=True)
    statistic = sum((seen - count * chance) ** 2 / (count * chance) for seen, chance in pairs)
    return ChiSquare.of(statistic, len(chances) - 1, float(count), slack)


def homogeneity(left: Sequence[int], right: Sequence[int], slack: float = 0.0) -> ChiSquare:
    """Do two samples come from one distribution? Cells that both miss are left out."""
    m, n = sum(left), sum(right)
    pairs = [(a, b) for a, b in zip(left, right, strict=True) if a + b]
    statistic = sum((a * n - b * m) ** 2 / (m * n * (a + b)) for a, b in pairs)
    return ChiSquare.of(statistic, len(pairs) - 1, m * n / (m + n), slack)

"""Against published tables: critical_value values, and Cohen's non-centralities for power 0.9."""

from __future__ import annotations

import pytest
import torch

from paceline.lab.certify.chisquare import (
    critical_value,
    detectable_noncentrality,
    goodness_of_fit,
    holm,
    homogeneity,
    upper_tail,
)


@pytest.mark.parametrize(
    ("df", "alpha", "value"), [(1, 0.05, 3.841), (5, 0.01, 15.086), (30, 0.001, 59.703)]
)
def test_critical_values(df: int, alpha: float, value: float) -> None:
    assert critical_value(alpha, df) == pytest.approx(value, abs=1e-3)
    assert upper_tail(value, df) == pytest.approx(alpha, rel=1e-3)


@pytest.mark.parametrize(("df", "value"), [(1, 10.507), (2, 12.654), (4, 15.405), (10, 20.532)])
def test_noncentrality_for_power(df: int, value: float) -> None:
    assert detectable_noncentrality(0.05, 0.9, df) == pytest.approx(value, abs=2e-3)


def test_noncentral_tail_against_simulation() -> None:
    generator = torch.Generator().manual_seed(0)
    shifts = torch.tensor([2.0, 1.0, 0.0])  # non-centrality 5
    drawn = (torch.randn(200_000, 3, generator=generator) + shifts).square().sum(-1)
    for limit in (4.0, 8.0, 15.0):
        share = float((drawn > limit).float().mean())
        assert upper_tail(limit, 3, 5.0) == pytest.approx(share, abs=0.005)
    assert upper_tail(0.0, 3) == 1.0
    assert upper_tail(1e4, 100, 5000.0) == pytest.approx(0.0, abs=1e-12)
    assert upper_tail(5000.0, 100, 5000.0) > 0.7  # large non-centralities do not lose their mass


def test_goodness_of_fit() -> None:
    outcome = goodness_of_fit([44, 56], [0.5, 0.5])
    assert outcome.statistic == pytest.approx(1.44)
    assert outcome.df == 1
    assert outcome.p_value == pytest.approx(0.2301, abs=1e-4)
    assert goodness_of_fit([44, 56], [0.5, 0.5], rounding_effect=0.01).p_value > outcome.p_value


def test_homogeneity_is_the_two_by_two_table() -> None:
    # n (ad - bc)^2 / ((a+b)(c+d)(a+c)(b+d)) for 10 20 / 30 15
    outcome = homogeneity([10, 20], [30, 15])
    assert outcome.statistic == pytest.approx(75 * (10 * 15 - 20 * 30) ** 2 / (30 * 45 * 40 * 35))
    assert homogeneity([5, 0, 5], [4, 0, 6]).df == 1


def test_smallest_bias_is_found_with_that_power() -> None:
    """A bias of the promised size, in its least visible form, is found nine times in ten."""
    chances = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64)
    samples, alpha = 1000, 0.01
    bias = goodness_of_fit([250] * 4, chances.tolist()).smallest_bias(alpha)
    moved = chances + bias / 2 * torch.tensor([1.0, 1.0, -1.0, -1.0])
    generator = torch.Generator().manual_seed(1)
    shown = 0
    for _ in range(400):
        drawn = torch.multinomial(moved, samples, True, generator=generator)
        counts = torch.bincount(drawn, minlength=4).tolist()
        shown += goodness_of_fit(counts, chances.tolist()).p_value < alpha
    assert 0.86 <= shown / 400 <= 0.94


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []

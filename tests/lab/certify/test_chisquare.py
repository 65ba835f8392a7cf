"""Against published tables (critical values, Cohen's power), and by simulation."""

from __future__ import annotations

import pytest
import torch

from paceline.lab.certify.chisquare import ChiSquare, RankCounts, homogeneity


@pytest.mark.parametrize(
    ("df", "alpha", "value"), [(1, 0.05, 3.841), (5, 0.01, 15.086), (30, 0.001, 59.703)]
)
def test_critical_values(df: int, alpha: float, value: float) -> None:
    assert ChiSquare(value, df, 100).p_value == pytest.approx(alpha, rel=1e-3)


def test_without_a_degree_of_freedom_nothing_is_unlikely() -> None:
    assert ChiSquare(0.0, 0, 100).p_value == 1.0


@pytest.mark.parametrize(("df", "value"), [(2, 12.654), (4, 15.405), (10, 20.532)])
def test_the_smallest_bias_has_that_power(df: int, value: float) -> None:
    """Cohen's non-centralities for alpha 0.05 and power 0.9; n w² with w = 2 TV."""
    bias = ChiSquare(0.0, df, 1000).smallest_bias(0.05)
    assert 1000 * (2 * bias) ** 2 == pytest.approx(value, rel=0.1)


def test_homogeneity_is_the_two_by_two_table() -> None:
    # n (ad - bc)^2 / ((a+b)(c+d)(a+c)(b+d)) for 10 20 / 30 15
    outcome = homogeneity([10, 20], [30, 15])
    assert outcome.statistic == pytest.approx(75 * (10 * 15 - 20 * 30) ** 2 / (30 * 45 * 40 * 35))
    assert homogeneity([5, 0, 5], [4, 0, 6]).df == 1


# -- ranks ----------------------------------------------------------------------------------------

PROBS = torch.tensor([0.02, 0.5, 0.0, 0.3, 0.01, 0.17])


def drawn(probs: torch.Tensor, count: int = 4000) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.multinomial(probs, count, True, generator=generator).tolist()


def test_tokens_are_counted_by_rank() -> None:
    ranks = RankCounts()
    ranks.add(3 * PROBS, [1, 1, 5, 3, 0, 4])
    assert ranks.counts[:5] == [2, 1, 1, 2, 0] and ranks.total == 6 and not ranks.impossible
    expected = [6 * p for p in (0.5, 0.3, 0.17, 0.03)]
    assert ranks.expected[:4].tolist() == pytest.approx(expected)
    ranks.add(torch.arange(100, 0, -1), [99])
    assert ranks.expected[-1] == pytest.approx(35 * 36 / (100 * 101)) and ranks.counts[-1] == 1


def test_tokens_that_follow_their_distribution_pass() -> None:
    ranks = RankCounts()
    ranks.add(PROBS, drawn(PROBS))
    outcome = ranks.test()
    counts = [ranks.counts[rank] for rank in range(4)]
    pairs = zip(counts, [4000 * p for p in (0.5, 0.3, 0.17, 0.03)], strict=True)
    assert outcome.statistic == pytest.approx(sum((n - e) ** 2 / e for n, e in pairs), rel=1e-4)
    assert outcome.df == 3 and outcome.p_value > 0.01


def test_bins_in_which_little_is_expected_share_a_cell() -> None:
    ranks = RankCounts()
    ranks.add(PROBS, drawn(PROBS, 30))
    assert ranks.test().df == 2
    ranks = RankCounts()
    ranks.add(torch.tensor([0.0, 1.0, 0.0]), [1] * 500)
    assert ranks.test() == ChiSquare(0.0, 0, 500)
    assert ranks.test().p_value == ranks.test().smallest_bias(0.001) == 1.0


def test_a_bias_is_detected() -> None:
    """A tenth of the probability moves from one token to another."""
    moved, ranks = PROBS.clone(), RankCounts()
    moved[[1, 3]] += torch.tensor([-0.1, 0.1])
    ranks.add(PROBS, drawn(moved))
    assert ranks.test().p_value < 1e-9


def test_impossible_tokens_are_counted() -> None:
    ranks = RankCounts()
    ranks.add(PROBS, [2, 2, 1])
    assert ranks.impossible == 2

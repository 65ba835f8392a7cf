"""Cells are a partition; each beginning is tested with its own distribution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from paceline.lab.certify.run import cell_test

PROBS = torch.tensor([0.02, 0.5, 0.0, 0.3, 0.01, 0.17])


def drawn(*counts: int) -> Counter[int]:
    return Counter(dict(enumerate(counts)))


@pytest.mark.parametrize(
    ("counts", "tokens"),
    [
        ((1, 24, 0, 16, 1, 8), [1, 3]),
        ((5, 90, 0, 70, 3, 32), [1, 3, 5]),
        ((9, 160, 0, 107, 0, 57), [1, 3, 5]),
        ((0, 10, 0, 4, 0, 3), [1]),
    ],
)
def test_cells_are_likely_tokens_and_one_for_the_others(
    counts: tuple[int, ...], tokens: list[int]
) -> None:
    """Tokens are likely if five samples are expected."""
    moved, total = PROBS.roll(1), sum(counts)
    outcome, rounding = cell_test(PROBS, moved, drawn(*counts))
    assert outcome.df == len(tokens)
    probs = PROBS[tokens].double().tolist()
    cells = [(counts[t], p) for t, p in zip(tokens, probs, strict=True)]
    cells.append((total - sum(count for count, _ in cells), 1 - sum(probs)))
    expected = sum((count - total * p) ** 2 / (total * p) for count, p in cells)
    assert outcome.statistic == pytest.approx(expected, rel=1e-4)
    apart = [abs(float(PROBS[t] - moved[t])) for t in tokens]
    rest = abs(float(PROBS[tokens].sum() - moved[tokens].sum()))
    assert rounding == pytest.approx((sum(apart) + rest) / 2, abs=1e-6)


def test_a_certain_distribution_has_one_cell() -> None:
    certain = torch.tensor([0.0, 1.0, 0.0])
    outcome, rounding = cell_test(certain, certain, drawn(0, 500))
    assert outcome.df == outcome.statistic == outcome.null_noncentrality == rounding == 0

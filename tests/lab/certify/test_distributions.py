"""Cells are a partition; each beginning is tested with its own distribution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from paceline.lab.certify.run import Cells

PROBS = torch.tensor([0.02, 0.5, 0.0, 0.3, 0.01, 0.17])


@pytest.mark.parametrize(
    ("samples", "tokens"), [(50, [1, 3]), (200, [1, 3, 5]), (333, [1, 3, 5]), (17, [1])]
)
def test_cells_are_likely_tokens_and_one_for_the_others(samples: int, tokens: list[int]) -> None:
    """Tokens are likely if five samples are expected."""
    moved, least = PROBS.roll(1), 5 / samples
    cells = Cells.of(PROBS, moved, samples)
    assert cells.likely == tokens
    assert cells.probs == pytest.approx([*PROBS[tokens].tolist(), 1 - float(PROBS[tokens].sum())])
    assert min(cells.probs) >= least - 1e-6
    assert cells.counts(Counter([1, 2, 4, 1])) == [2, *[0] * (len(tokens) - 1), 2]
    apart = [abs(float(PROBS[t] - moved[t])) for t in tokens]
    rest = abs(float(PROBS[tokens].sum() - moved[tokens].sum()))
    assert cells.rounding == pytest.approx((sum(apart) + rest) / 2, abs=1e-6)


def test_a_certain_distribution_has_one_cell() -> None:
    certain = torch.tensor([0.0, 1.0, 0.0])
    cells = Cells.of(certain, certain, 500)
    assert (
        len(cells.probs) == 1 and cells.counts(Counter([1, 1])) == [2] and not cells.rounding_effect
    )

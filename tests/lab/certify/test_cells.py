"""Cells are a partition, and their chances are the distribution's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from paceline.lab.certify.cells import Cells, String, make_cells
from paceline.lab.certify.sampled import shares

VOCAB = 6


def distribution_of(seed: int):
    """Random distributions that depend on the whole string before."""

    def distributions(strings: Sequence[String]) -> torch.Tensor:
        rows = []
        for string in strings:
            generator = torch.Generator().manual_seed(seed + hash(string) % 10_000)
            rows.append(torch.softmax(2 * torch.randn(VOCAB, generator=generator), -1))
        return torch.stack(rows)

    return distributions


def chance(string: String, distributions) -> float:
    result = 1.0
    for place, token in enumerate(string):
        result *= float(distributions([string[:place]])[0][token].double())
    return result


def summed(cells: Cells, distributions, depth: int) -> list[float]:
    found = [0.0] * len(cells)
    for string in itertools.product(range(VOCAB), repeat=depth):
        found[cells.cell_of(string)] += chance(string, distributions)
    return found


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("least", [0.01, 0.1])
def test_chances_are_sums_over_strings(depth: int, least: float) -> None:
    distributions, other = distribution_of(0), distribution_of(50)
    cells = make_cells(distributions, depth, least)
    assert cells.chances == pytest.approx(summed(cells, distributions, depth), abs=1e-6)
    assert sum(cells.chances) == pytest.approx(1.0, abs=1e-6)
    assert cells.chances_under(other) == pytest.approx(summed(cells, other, depth), abs=1e-6)
    assert min(cells.chances) >= least - 1e-9


def test_likely_beginnings_are_split() -> None:
    cells = make_cells(distribution_of(0), 3, 0.01)
    assert max(len(leaf) for leaf in cells.leaves) == 3
    assert len(make_cells(distribution_of(0), 3, 0.01, most_splits=1)) < len(cells)


def test_a_certain_distribution_has_one_cell() -> None:
    certain = torch.zeros(VOCAB)
    certain[2] = 1.0
    cells = make_cells(lambda strings: certain.repeat(len(strings), 1), 2, 0.01)
    assert len(cells) == 1
    assert cells.counts([(2, 2), (2, 2)]) == [2]


def test_tokens_fill_equal_bins_from_the_likeliest_down() -> None:
    distribution = torch.tensor([0.1, 0.6, 0.0, 0.3])
    found = shares(distribution, 10)
    first, last = torch.eye(10)[:6].sum(0) / 6, torch.eye(10)[9]
    expected = torch.stack([last, first, last, torch.eye(10)[6:9].sum(0) / 3])
    assert torch.allclose(found, expected.double())
    assert torch.allclose(distribution.double() @ found, torch.full((10,), 0.1).double())
    moved = torch.tensor([0.1, 0.3, 0.0, 0.6]).double() @ found
    assert moved.tolist() == pytest.approx([0.05] * 6 + [0.2] * 3 + [0.1])

"""Counter-based noise: pinned values, the right distribution, no dependence between entries."""

import math

import pytest
import torch

from paceline.core import noise as noise_module
from paceline.core.noise import gumbel, noise_key, noise_keys, splitmix64

GOLDEN_KEYS = (-6411193824288604561, 7244599215465125564)
GOLDEN_HASHES = [
    [7283311227631128788, 6203360018377989565, 576844204226626416],
    [2253060405519071620, 3773838374497899748, 5332120249523095181],
    [5604876195633520060, 6381031220148626377, 199628377305988501],
]
GOLDEN_GUMBEL = [-0.4440583, -0.1101808, 2.7398062]


def hashes(seeds, positions, vocab):
    ids = noise_module.id_hashes(vocab, torch.device("cpu"))
    return noise_module._random_bits(noise_keys(seeds, positions), ids)


def exponential(seeds, positions, vocab):
    return noise_module.exponential(noise_keys(seeds, positions), vocab)


def test_splitmix64_known_values():
    """First outputs for state 0 and state 1234567, from the reference implementation."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317


def test_golden_values():
    """A change here changes the text of every seeded request."""
    assert noise_key(0, 0) == GOLDEN_KEYS[0] and noise_key(2**63 - 1, 10**6) == GOLDEN_KEYS[1]
    assert hashes([1, 1, 2], [5, 6, 5], 3).tolist() == GOLDEN_HASHES
    expected = torch.tensor(GOLDEN_GUMBEL)
    assert torch.allclose(gumbel([1], [5], 3)[0], expected, rtol=1e-6, atol=1e-6)


def slow_hash(seed, position, token):
    """The definition, in Python's whole numbers."""
    bits = (1 << 64) - 1
    stream = splitmix64((token * 0x9E3779B97F4A7C15) & bits)
    x = ((stream ^ noise_key(seed, position)) * 0xBF58476D1CE4E5B9) & bits
    x ^= ((x - (x >> 63 << 64)) >> 32) & bits  # the shift copies the sign bit
    return (x * 0x94D049BB133111EB) & bits >> 1


def test_hashes_are_what_they_are_defined_to_be():
    seeds, positions = [0, 1, 2**63 - 1, 17], [0, 5, 131072, 3]
    expected = [
        [slow_hash(s, t, token) for token in range(40)]
        for s, t in zip(seeds, positions, strict=True)
    ]
    assert hashes(seeds, positions, 40).tolist() == expected


def test_entry_depends_on_seed_position_and_id_alone():
    alone = exponential([9], [100], 50)
    together = exponential([3, 9, 9], [100, 100, 101], 70)
    assert together[1, :50].equal(alone[0])
    assert not together[2, :50].equal(alone[0])
    assert not together[0, :50].equal(alone[0])


def test_gumbel_is_minus_log_of_the_exponential():
    noise = exponential([4], [2], 1000)
    assert torch.allclose(gumbel([4], [2], 1000), -noise.log(), rtol=1e-6, atol=1e-6)
    assert noise.isfinite().all() and (noise > 0).all()


@pytest.mark.parametrize("extreme", [0, 1, (1 << 63) - 1])
def test_extreme_hashes_give_finite_noise(extreme, monkeypatch):
    """An infinite or zero entry would make 0 / 0 of an impossible token."""
    monkeypatch.setattr(
        "paceline.core.noise._random_bits",
        lambda *_: torch.full((1, 2), extreme, dtype=torch.int64),
    )
    noise = exponential([0], [0], 2)
    assert noise.isfinite().all() and (noise > 0).all()
    assert gumbel([0], [0], 2).isfinite().all()


def chi_square(counts):
    counts = counts.double()
    expected = counts.sum() / counts.numel()
    return float(((counts - expected) ** 2 / expected).sum())


def limit(freedom):
    """About the 0.9999 quantile of chi-square (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3


def uniforms(seeds, positions, vocab):
    return torch.exp(-exponential(seeds, positions, vocab).double())


@pytest.mark.parametrize(
    "seeds, positions",
    [([7] * 64, range(64)), (range(64), [7] * 64), ([s << 32 for s in range(64)], range(64))],
    ids=["positions", "seeds", "both"],
)
def test_uniform_in_every_direction(seeds, positions):
    """Over ids of one row, over rows of one id, and jointly for neighbours of either kind."""
    u = uniforms(list(seeds), list(positions), 4096)
    bins = (u * 16).long().clamp(max=15)
    assert chi_square(torch.bincount(bins.flatten(), minlength=16)) < limit(15)
    for pairs in (
        16 * bins[:, :-1] + bins[:, 1:],  # next id
        16 * bins[:-1] + bins[1:],  # next row
        16 * bins[:-1, :-1] + bins[1:, 1:],
        16 * bins[:-2] + bins[2:],
    ):
        assert chi_square(torch.bincount(pairs.flatten(), minlength=256)) < limit(255)


def test_the_winner_is_uniform_and_independent_of_the_last_one():
    """What matters: which id wins, and that it says nothing of the next position's winner."""
    winners = exponential([5] * 8000, range(8000), 8).argmin(-1)
    assert chi_square(torch.bincount(winners, minlength=8)) < limit(7)
    pairs = 8 * winners[:-1] + winners[1:]
    assert chi_square(torch.bincount(pairs, minlength=64)) < limit(63)


def test_small_values_keep_their_precision():
    """The k-th smallest of n Exp(1) is near k / n; the smallest decide who wins."""
    noise = exponential(range(512), [0] * 512, 4096).flatten()
    smallest = noise.sort().values[:1000].double()
    ratio = smallest[99:].div(torch.arange(100, 1001) / noise.numel())
    assert float(ratio.min()) > 0.7 and float(ratio.max()) < 1.4
    assert smallest.unique().numel() == 1000

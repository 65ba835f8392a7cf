"""Counter-based random noise: a pure function of (seed, position, vocabulary id).

Under the coupled rule (Daliri, Musco and Suresh 2024, arXiv 2408.07978) drafter and target sample
with the same noise. Entry (r, x) depends on ``seeds[r]``, ``positions[r]`` and x alone, not on the
batch or the width of the vocabulary. The integer part has the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from paceline.core.transfer import to_device

_BITS64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
# The range of v in which -log1p(-v) is finite and above zero in float32.
_LOWEST, _HIGHEST = 2.0**-63, 1.0 - 2.0**-24


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def splitmix64(value: int) -> int:
    """One output of the SplitMix64 generator in state ``value`` (Steele, Lea and Flood 2014)."""
    value = (value + _GOLDEN) & _BITS64
    value = ((value ^ (value >> 30)) * _MIX_1) & _BITS64
    value = ((value ^ (value >> 27)) * _MIX_2) & _BITS64
    return value ^ (value >> 31)


def noise_key(seed: int, position: int) -> int:
    """Signed 64-bit key of one row of noise. ``position``: index of the token to sample."""
    return _signed(splitmix64(splitmix64(seed) ^ position))


@lru_cache(maxsize=16)
def id_hashes(vocab: int, device: torch.device) -> torch.Tensor:
    """int64 [vocab]: the outputs of splitmix64 from state 0, one per vocabulary id."""
    with torch.inference_mode(False):
        x = torch.arange(vocab, dtype=torch.int64) * _signed(_GOLDEN) + _signed(_GOLDEN)
        for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
            # `>>` copies the sign bit: the mask makes the shift a logical one.
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
        return (x ^ ((x >> 31) & ((1 << 33) - 1))).to(device)


def _random_bits(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [rows, n] of 63 random bits each, from well-mixed keys [rows, 1] and id hashes [n]."""
    # The ids are well mixed already, so two wrapping products with a shift between them suffice.
    # The shift copies the sign bit, which costs one of the 64 bits.
    x = ids ^ keys
    x *= _signed(_MIX_1)
    x ^= x >> 32
    x *= _signed(_MIX_2)
    x &= (1 << 63) - 1
    return x


def noise_keys(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """int64 [rows, 1]: the noise keys of rows with these seeds and positions."""
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    return to_device(keys, device).unsqueeze(1)


def random_keys(rows: int, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """int64 [rows, 1]: noise keys drawn from ``generator``. Noise made from keys is faster than
    ``Tensor.exponential_`` on a CPU, and more precise in small values on CUDA, where uniforms have
    24 bits."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (rows, 1), device=device, generator=generator)


def exponential(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """float32 [rows, vocab] of Exp(1) noise E from keys [rows, 1], finite and above zero, with full
    relative precision in small values. argmax_x p(x) / E(x) is a sample of p. It is the token of
    the Gumbel-max trick, argmax_x log p(x) + gumbel(x), but needs two logarithms less."""
    v = _random_bits(keys, id_hashes(vocab, keys.device)).to(torch.float32)
    v *= -(2.0**-63)
    return v.clamp_(-_HIGHEST, -_LOWEST).log1p_().neg_()


def gumbel(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """float32 [rows, vocab] of standard Gumbel noise, ``-log(exponential(...))``."""
    return exponential(noise_keys(seeds, positions, device), vocab).log_().neg_()


def exponential_race(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 [rows, vocab]: the distributions ``probs`` divided by the exponential noise of
    ``keys`` [rows, 1]. The argmax of a row is a sample of its distribution."""
    return probs / exponential(keys, probs.shape[1])

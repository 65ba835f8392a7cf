"""Counter-based random noise: a pure function of (seed, position, vocabulary id).

With the coupled rule (Daliri, Musco and Suresh 2024, arXiv 2408.07978) drafter and target use the
same noise. Entry (r, x) depends on ``seeds[r]``, ``positions[r]`` and x alone, not on the batch or
the vocabulary's width; the integer part has the same bits on every device.
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
# Where -log1p(-v) is finite and above zero in float32.
_LOWEST, _HIGHEST = 2.0**-63, 1.0 - 2.0**-24


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value


def splitmix64(value: int) -> int:
    """Steele, Lea and Flood 2014: one output of the generator in state ``value``."""
    value = (value + _GOLDEN) & _BITS64
    value = ((value ^ (value >> 30)) * _MIX_1) & _BITS64
    value = ((value ^ (value >> 27)) * _MIX_2) & _BITS64
    return value ^ (value >> 31)


def noise_key(seed: int, position: int) -> int:
    """Signed 64-bit key of one row of noise. ``position``: index of the token being chosen."""
    return _signed(splitmix64(splitmix64(seed) ^ position))


@lru_cache(maxsize=16)
def _id_hashes(vocab: int, device: torch.device) -> torch.Tensor:
    """int64 [vocab]: the outputs of splitmix64 from state 0, one per vocabulary id."""
    with torch.inference_mode(False):
        x = torch.arange(vocab, dtype=torch.int64) * _signed(_GOLDEN) + _signed(_GOLDEN)
        for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
            # `>>` copies the sign bit: the mask makes the shift a logical one.
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
        return (x ^ ((x >> 31) & ((1 << 33) - 1))).to(device)


def _random_bits(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [rows, n] of 63 random bits each, from well-mixed keys [rows, 1] and ids [n]."""
    # Ids are well mixed too, so two wrapping products with one shift between them suffice. The
    # shift copies the sign bit, which costs one of 64 bits.
    x = ids ^ keys
    x *= _signed(_MIX_1)
    x ^= x >> 32
    x *= _signed(_MIX_2)
    x &= (1 << 63) - 1
    return x


def _exponential(bits: torch.Tensor) -> torch.Tensor:
    """float32 Exp(1) noise, finite and above zero, from 63 random bits each."""
    v = bits.to(torch.float32)
    v *= -(2.0**-63)
    return v.clamp_(-_HIGHEST, -_LOWEST).log1p_().neg_()


def noise_keys(
    seeds: Sequence[int], positions: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """int64 [rows, 1]: the keys of the noise of rows that have a seed."""
    keys = [noise_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    return to_device(keys, device).unsqueeze(1)


def random_keys(rows: int, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """int64 [rows, 1]: keys drawn from ``generator``. On a CPU noise under keys is faster than
    ``Tensor.exponential_``, and on CUDA more precise in small values (uniforms have 24 bits
    there)."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (rows, 1), device=device, generator=generator)


def exponential(keys: torch.Tensor, vocab: int) -> torch.Tensor:
    """float32 [rows, vocab] of Exp(1) noise under keys [rows, 1], finite and above zero, with full
    relative precision in small values. argmax_x p(x) / E(x) is a draw from p, the same token as
    argmax_x log p(x) + gumbel(x), two logarithms cheaper."""
    return _exponential(_random_bits(keys, _id_hashes(vocab, keys.device)))


def gumbel(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """float32 [rows, vocab] of standard Gumbel noise, ``-log(exponential(...))``."""
    return exponential(noise_keys(seeds, positions, device), vocab).log_().neg_()


def exponential_race(probs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """float32 [rows, vocab]: distributions over exponential noise under keys [rows, 1]; a row's
    argmax is a draw."""
    return probs / exponential(keys, probs.shape[1])

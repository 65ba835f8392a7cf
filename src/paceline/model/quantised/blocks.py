"""Tensors of GGUF files as the weights of ``weights.py``: number for number, nothing rounded again.

=====  =====  ============================================================================
type   block  what a number is (d, m, dmin: half precision; sc, mn: whole numbers)
=====  =====  ============================================================================
Q8_0      32  ``d * q``, q in 8 bits
Q4_0      32  ``d * (q - 8)``, q in 4 bits: inputs 0 to 15 in the low halves of bytes
Q4_1      32  ``d * q + m``
Q4_K     256  ``d * sc * q - dmin * mn``, sc and mn (6 bits) of each 32 inputs
Q6_K     256  ``d * sc * (q - 32)``, q in 6 bits, sc (8 bits) of each 16 inputs
=====  =====  ============================================================================

(ggml-common.h and ggml-quants.c of llama.cpp; the ``gguf`` package dequantises the same.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.errors import ModelLoadError
from paceline.model.quantised.weights import QuantisedWeight

Array = np.ndarray[Any, Any]


def weight_of_blocks(name: str, kind: str, data: Array) -> QuantisedWeight:
    """The weight that ``data [out, bytes]`` of a tensor of type ``kind`` holds.

    Raises ModelLoadError that names the tensor, where its scales are no numbers.
    """
    read, size, inputs, bits, from_zero = _KINDS[kind]
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    codes, scales, offsets = read(blocks)
    rows = len(data)
    shape = (rows, blocks.shape[0] // rows * inputs)
    weight = QuantisedWeight(
        torch.from_numpy(codes.reshape(shape)),
        torch.from_numpy(scales.reshape(rows, -1)),
        bits,
        None if offsets is None else torch.from_numpy(offsets.reshape(rows, -1)),
        from_zero,
    )
    for part in (weight.scales, weight.offsets):
        if part is not None and not bool(torch.isfinite(part).all()):
            row = int((~torch.isfinite(part)).nonzero()[0][0])
            raise ModelLoadError(
                f"a scale of {name} is no number (row {row}); download or copy the file again"
            )
    return weight


def can_keep(kind: str) -> bool:
    return kind in _KINDS


_Parts = tuple[Array, Array, Array | None]


def _half(blocks: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(codes: Array) -> Array:
    """Of bytes ``[blocks, parts, n]``: all low halves of a part, then all high ones."""
    return np.concatenate([codes & 15, codes >> 4], -1).reshape(len(codes), -1).view(np.int8)


def _q8_0(blocks: Array) -> _Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, None, 2:]) - np.int8(8), _half(blocks, 0), None


def _q4_1(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, None, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Array) -> _Parts:
    packed = blocks[:, 4:16]
    low, high, more = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (more & 15) | (low >> 2 & 48)], -1)
    least = np.concatenate([high & 63, (more >> 4) | (high >> 2 & 48)], -1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    offsets = -(_half(blocks, 2) * least.astype(np.float32))
    return codes, _half(blocks, 0) * scales.astype(np.float32), offsets


def _q6_k(blocks: Array) -> _Parts:
    lower, upper = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    low = np.concatenate([lower & 15, lower >> 4], -1)
    high = np.concatenate([upper >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (low | high << 4).reshape(len(blocks), -1).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes, _half(blocks, 208) * scales, None


_Kind = tuple[Callable[[Array], _Parts], int, int, int, bool]
# Of each type: its reader, bytes and inputs of a block, bits of a code here, codes from zero on.
_KINDS: dict[str, _Kind] = {
    "Q8_0": (_q8_0, 34, 32, 8, False),
    "Q4_0": (_q4_0, 18, 32, 4, False),
    "Q4_1": (_q4_1, 20, 32, 4, True),
    "Q4_K": (_q4_k, 144, 256, 4, True),
    "Q6_K": (_q6_k, 210, 256, 8, False),
}

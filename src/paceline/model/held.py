"""What a loaded model's matrices are held as: formats, and the bytes that reading them takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.model.backends.native.packing import PackedLinear
from paceline.model.backends.reference.products import MergedPart, PrepackedLinear, is_plain
from paceline.model.quantised.weights import QuantisedLinear

_FEW_BITS = 8


@dataclass(frozen=True)
class HeldMatrix:
    """One linear layer. ``format``: "int4", "int8", or the name of a dtype or of a library's own
    layer; ``bits`` of a code or number, ``bytes`` with scales and padding as they lie in memory."""

    format: str
    bits: int
    elements: int
    bytes: int


def held_matrices(hf: nn.Module) -> Iterator[HeldMatrix]:
    """Every linear layer of a model once, in any layout; embeddings, of which a step reads a few
    rows, are none."""
    parts = {id(m.merged) for m in hf.modules() if isinstance(m, MergedPart)}
    for module in hf.modules():
        if id(module) not in parts and (found := _held(module)) is not None:
            yield found


def _held(module: Any) -> HeldMatrix | None:
    if isinstance(module, PackedLinear):
        elements = module.in_features * module.out_features
        packed, form = module.packed, module.packed.form
        size = packed.data.nbytes * elements // max(1, packed.elements)
        return (
            _numbers(packed.dtype, elements, size)
            if form is None
            else _codes(form.bits, elements, size)
        )
    if isinstance(module, QuantisedLinear):
        quantised = module.quantised
        scales = [part for part in (quantised.scales, quantised.offsets) if part is not None]
        size = quantised.codes.nbytes + sum(part.nbytes for part in scales)
        return _codes(quantised.bits, quantised.codes.numel(), size)
    if isinstance(module, (PrepackedLinear, MergedPart)):
        whole = module.merged if isinstance(module, MergedPart) else module
        elements = module.in_features * module.out_features
        dtype = whole.prepacked.dtype
        return _numbers(dtype, elements, elements * dtype.itemsize)
    if isinstance(module, nn.Linear):
        numbers = module.weight.detach()
        if is_plain(numbers) and numbers.is_floating_point():
            return _numbers(numbers.dtype, numbers.numel(), numbers.nbytes)
        elements = module.in_features * module.out_features
        size = numbers.nbytes
        return HeldMatrix(type(module).__name__, 8 * size // max(1, elements), elements, size)
    return None


def _codes(bits: int, elements: int, size: int) -> HeldMatrix:
    return HeldMatrix(f"int{bits}", bits, elements, size)


def _numbers(dtype: torch.dtype, elements: int, size: int) -> HeldMatrix:
    return HeldMatrix(str(dtype).removeprefix("torch."), 8 * dtype.itemsize, elements, size)


def usual_bits(hf: nn.Module) -> int:
    """Bits in which most numbers of the matrices are held; 0 without any."""
    counts: dict[int, int] = {}
    for held in held_matrices(hf):
        counts[held.bits] = counts.get(held.bits, 0) + held.elements
    return max(counts, key=lambda bits: counts[bits], default=0)


def is_few(hf: nn.Module) -> bool:
    """Whether most numbers are held in as few bits as only quantised weights have."""
    return 0 < usual_bits(hf) <= _FEW_BITS

"""What a loaded model's matrices are held as: formats, and the bytes that reading them takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from paceline.model.quantised.convert import EIGHT_BIT_GROUP
from paceline.model.quantised.weights import ROW_GROUP, HeldLinear, HeldMatrix, is_plain

_FEW_BITS = 8


def held_matrices(hf: nn.Module) -> Iterator[HeldMatrix]:
    """Every linear layer of a model once, in any layout; embeddings, of which a step reads a few
    rows, are none."""
    for _, held in _linear(hf):
        yield held


def _linear(hf: nn.Module) -> Iterator[tuple[Any, HeldMatrix]]:
    for module in hf.modules():
        if isinstance(module, HeldLinear):
            yield module, module.held()
        elif isinstance(module, nn.Linear):
            yield module, _held(module)


def _held(linear: nn.Linear) -> HeldMatrix:
    numbers = linear.weight.detach()
    if is_plain(numbers) and numbers.is_floating_point():
        return HeldMatrix.numbers(numbers.dtype, numbers.numel(), numbers.nbytes)
    elements, size = linear.in_features * linear.out_features, numbers.nbytes
    return HeldMatrix(type(linear).__name__, 8 * size // max(1, elements), elements, size)


# Bytes of a number: in four bits there are a scale and an offset for a group of 32, in eight a
# scale for 64, in half precision for the kernels. Without these a code has a byte to itself, and
# its scale four.
_KERNELS = {"int8": 1.0 + 2 / EIGHT_BIT_GROUP, "int4": 0.5 + 2 * 2 / ROW_GROUP}
_READABLE = {"int8": 1.0 + 4 / EIGHT_BIT_GROUP, "int4": 1.0 + 2 * 4 / ROW_GROUP}


def rounded_bytes(hf: Any, precision: str, width: int, readable: bool = False) -> int:
    """Of a model's matrices rounded to ``precision``, in memory; the head in 8 bits, and what has
    no groups in numbers of ``width`` bytes. ``readable``: without the kernels' layout."""
    widths = _READABLE if readable else _KERNELS
    head, total = hf.get_output_embeddings(), 0.0
    for module, held in _linear(hf):
        number = widths["int8" if module is head else precision]
        total += (width if module.in_features % ROW_GROUP else number) * held.elements
    return int(total)


def usual_bits(hf: nn.Module) -> int:
    """Bits in which most numbers of the matrices are held; 0 without any."""
    counts: dict[int, int] = {}
    for held in held_matrices(hf):
        counts[held.bits] = counts.get(held.bits, 0) + held.elements
    return max(counts, key=lambda bits: counts[bits], default=0)


def is_few(hf: nn.Module) -> bool:
    """Whether most numbers are held in as few bits as only quantised weights have."""
    return 0 < usual_bits(hf) <= _FEW_BITS

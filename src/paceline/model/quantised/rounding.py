"""Round a weight to codes: to the nearest, on the grid of least error, or by GPTQ.

GPTQ (Frantar et al. 2023, arXiv:2210.17323, algorithm 1) rounds the inputs of a layer in order and
corrects the later ones for the error, by ``H = X^T X`` of the layer's inputs over calibration text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from paceline.errors import ConfigError
from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import DTYPES, check, library, pointer
from paceline.model.quantised.weights import QuantisedWeight

# A group's zero point: 0, a whole multiple of the scale (as in most formats), or any number.
Zero = Literal["none", "whole", "free"]
_IN_KERNELS: dict[Zero, int] = {"none": 0, "whole": 1, "free": 2}

_SHRINKS = {  # of the group's range; 256 codes gain nothing where much is cut off
    4: tuple(1 - 0.025 * step for step in range(17)),
    8: tuple(1 - 0.025 * step for step in range(5)),
}
_CACHED = 1 << 16  # numbers
_DAMPING = 0.01  # of the mean of H's diagonal, as in the paper
_BLOCK = 128  # columns after which the later columns are corrected
_LEAST_HALF = 2**-14  # of normal numbers: smaller ones lose digits


def nearest(weight: torch.Tensor, bits: int, group: int, zero: Zero = "none") -> QuantisedWeight:
    """The nearest codes of ``weight [out, in]`` on the grid of least squared error; ``group``
    inputs share a scale. Scales are numbers of bf16, as checkpoints store them, unless the zero is
    "free". Raises ConfigError where ``group`` does not divide the inputs."""
    if weight.shape[1] % group:
        raise ConfigError(
            f"a weight of {weight.shape[1]} inputs does not divide into groups of {group}; "
            "choose a group that divides it"
        )
    parts = weight.reshape(len(weight), -1, group)
    codes, grids = [], []
    for rows in torch.split(parts, max(1, _CACHED // weight.shape[1])):
        numbers = rows.float()
        scales, offsets = grid = _best_grid(numbers, bits, zero)
        wide = None if offsets is None else offsets[..., None]
        codes.append(_codes(numbers, scales[..., None], wide, bits, zero).flatten(1))
        grids.append(grid)
    return _joined(torch.cat(codes), grids, 0, bits, zero)


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, bits: int, group: int, zero: Zero = "none"
) -> QuantisedWeight:
    """As ``nearest``, with later inputs corrected for earlier errors. ``hessian`` ``[in, in]``
    float32: ``X^T X`` of calibration rows. A group's grid is chosen at its first column."""
    left = weight.float().clone()
    factor = _inverse_factor(hessian)
    left[:, hessian.diagonal() == 0] = 0  # the weight of an input that is always 0
    columns = left.shape[1]
    codes = torch.empty_like(left)
    grids: list[_Grid] = []
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        errors = torch.empty(len(left), end - start)
        for column in range(start, end):
            if column % group == 0:
                grids.append(_best_grid(left[:, None, column : column + group], bits, zero))
            scales, offsets = grids[-1]  # [out, 1]
            values = left[:, column : column + 1]
            codes[:, column : column + 1] = code = _codes(values, scales, offsets, bits, zero)
            numbers = code * scales if offsets is None else code * scales + offsets
            error = (values - numbers)[:, 0] / factor[column, column]
            left[:, column:end] -= error[:, None] * factor[column, column:end]
            errors[:, column - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    return _joined(codes, grids, 1, bits, zero)


_Grid = tuple[torch.Tensor, torch.Tensor | None]  # scales and offsets, [out, groups]


def _joined(
    codes: torch.Tensor, grids: Sequence[_Grid], dim: int, bits: int, zero: Zero
) -> QuantisedWeight:
    scales = torch.cat([scales for scales, _ in grids], dim)
    offsets = [offsets for _, offsets in grids if offsets is not None]
    whole = torch.cat(offsets, dim) if offsets else None
    return QuantisedWeight(codes.to(torch.int8), scales, bits, whole, _limits(bits, zero)[0] == 0)


def _limits(bits: int, zero: Zero) -> tuple[int, int]:
    """The least and the largest code: without -128, whose sums overflow in some instructions."""
    if bits == 8:
        return -127, 127
    return (0, 15) if zero == "free" else (-8, 7)


def _codes(
    values: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, bits: int, zero: Zero
) -> torch.Tensor:
    wanted = values if offsets is None else values - offsets
    return (wanted / scales).round().clamp(*_limits(bits, zero))


def _best_grid(parts: torch.Tensor, bits: int, zero: Zero) -> _Grid:
    """``parts``: float32 ``[rows, groups, group]``, few enough to stay in the processor's cache."""
    low, high = parts.amin(-1), parts.amax(-1)
    best: _Grid | None = None
    least = torch.full(parts.shape[:2], torch.inf)
    for shrink in _SHRINKS[bits]:
        scales, offsets = _grid(low * shrink, high * shrink, bits, zero)
        wide = scales[..., None]
        wanted = parts if offsets is None else parts - offsets[..., None]
        rounded = (wanted * wide.reciprocal()).round_().clamp_(*_limits(bits, zero))
        error = _sum(rounded.mul_(wide).sub_(wanted).square_())
        better = error < least
        least = torch.where(better, error, least)
        if best is not None:
            scales = torch.where(better, scales, best[0])
            if offsets is not None and best[1] is not None:
                offsets = torch.where(better, offsets, best[1])
        best = scales, offsets
    assert best is not None
    return best


def _sum(squares: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, a multiple of 16, in the order of the kernels (csrc/rounding.h) on
    every machine; that of ``torch.sum`` depends on the width of the vectors."""
    lanes = squares.reshape(*squares.shape[:-1], -1, 16)
    total: torch.Tensor = lanes[..., 0, :]
    for part in range(1, lanes.shape[-2]):
        total = total + lanes[..., part, :]
    for width in (8, 4, 2, 1):
        total = total[..., :width] + total[..., width:]
    return total.squeeze(-1)


def _grid(low: torch.Tensor, high: torch.Tensor, bits: int, zero: Zero) -> _Grid:
    least, most = _limits(bits, zero)
    if zero != "none":
        scales = (high - low) / (2**bits - 1)
    elif bits == 8:
        scales = torch.maximum(-low, high) / most
    else:  # the scale has the sign that gives the group's larger side the extra code below 0
        scales = torch.where(-low > high, -low, -high) / (most + 1)
    scales = torch.where(scales == 0, 1.0, scales)
    if zero == "free":
        # In half precision, as in GGUF's Q4_1, unless a scale is too small or an offset too large.
        halves = scales.half().float()
        offsets = (low - least * halves).half().float()
        if bool((scales >= _LEAST_HALF).all() and torch.isfinite(offsets).all()):
            return halves, offsets
        return scales, low - least * scales
    scales = scales.bfloat16().float()
    if zero == "none":
        return scales, None
    points = (least - low / scales).round().clamp(least, most)
    return scales, -points * scales


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Upper Cholesky factor of the damped inverse of ``H``, float32."""
    damped = hessian.double()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
    return upper.float()


def round_to_nearest(
    weight: torch.Tensor, bits: int, group: int, zero: Zero = "none"
) -> QuantisedWeight:
    """``nearest``, by the kernels where there are any, in a tenth of the time."""
    rows, columns = weight.shape
    lanes = 16  # see _sum
    if weight.device.type != "cpu" or columns % group or group % lanes:
        return nearest(weight, bits, group, zero)
    try:
        kernels = library()
    except NativeUnavailableError:
        return nearest(weight, bits, group, zero)
    weight = (weight if weight.dtype in DTYPES else weight.float()).contiguous()
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // group)
    offsets = None if zero == "none" else torch.empty_like(scales)
    inputs = DTYPES[weight.dtype], weight.data_ptr(), rows, columns, group, bits, _IN_KERNELS[zero]
    outputs = pointer(codes), pointer(scales), pointer(offsets)
    check(kernels.pl_round(*inputs, *outputs, torch.get_num_threads()))
    return QuantisedWeight(codes, scales, bits, offsets, _limits(bits, zero)[0] == 0)

"""Quantise a weight: round to the nearest code, or by GPTQ.

Each group's grid (scale and offset) is the one of least squared error among several that cut off
more or less of the group's range. GPTQ (Frantar et al. 2023, arXiv:2210.17323, algorithm 1) rounds
the columns in order and corrects the later ones for the error, by ``H = X^T X`` of the layer's
inputs over calibration texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from paceline.errors import ConfigError
from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import DTYPES, check, library, pointer
from paceline.model.quantised.weights import QuantisedWeight

# A group's zero point: "none" is 0, "whole" an integer (as in most formats), "free" any offset.
ZeroPoint = Literal["none", "whole", "free"]
_KERNEL_ZERO_POINTS: dict[ZeroPoint, int] = {"none": 0, "whole": 1, "free": 2}

# Fractions of a group's range that are tried. With 256 codes, cutting off much gains nothing.
_SHRINKS = {
    4: tuple(1 - 0.025 * step for step in range(17)),
    8: tuple(1 - 0.025 * step for step in range(5)),
}
_CHUNK_NUMBERS = 1 << 16  # weights processed at once, so that they stay in the processor's cache
_DAMPING = 0.01  # times the mean of H's diagonal, as in the paper
_BLOCK = 128  # columns after which the later columns are corrected
_SMALLEST_NORMAL_HALF = 2**-14  # below it float16 loses digits


def nearest(
    weight: torch.Tensor, bits: int, group: int, zero: ZeroPoint = "none"
) -> QuantisedWeight:
    """Round ``weight [out, in]`` to the nearest codes; ``group`` inputs share a scale. Scales are
    rounded to bf16, as checkpoints store them, unless ``zero`` is "free". Raises ConfigError if
    ``group`` does not divide the inputs."""
    if weight.shape[1] % group:
        raise ConfigError(
            f"a weight of {weight.shape[1]} inputs does not divide into groups of {group}; "
            "choose a group that divides it"
        )
    parts = weight.reshape(len(weight), -1, group)
    codes, grids = [], []
    for rows in torch.split(parts, max(1, _CHUNK_NUMBERS // weight.shape[1])):
        numbers = rows.float()
        scales, offsets = grid = _best_grid(numbers, bits, zero)
        offsets = None if offsets is None else offsets[..., None]
        codes.append(_codes(numbers, scales[..., None], offsets, bits, zero).flatten(1))
        grids.append(grid)
    return _joined(torch.cat(codes), grids, 0, bits, zero)


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, bits: int, group: int, zero: ZeroPoint = "none"
) -> QuantisedWeight:
    """As ``nearest``, but later columns are corrected for the error of earlier ones. ``hessian``:
    float32 ``[in, in]``, ``X^T X`` over calibration rows. A group's grid is chosen when its first
    column is reached."""
    corrected = weight.float().clone()
    factor = _inverse_factor(hessian)
    corrected[:, hessian.diagonal() == 0] = 0  # an input that is always 0 needs no weight
    columns = corrected.shape[1]
    codes = torch.empty_like(corrected)
    grids: list[_Grid] = []
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        errors = torch.empty(len(corrected), end - start)
        for column in range(start, end):
            if column % group == 0:
                grids.append(_best_grid(corrected[:, None, column : column + group], bits, zero))
            scales, offsets = grids[-1]  # [out, 1]
            values = corrected[:, column : column + 1]
            codes[:, column : column + 1] = code = _codes(values, scales, offsets, bits, zero)
            numbers = code * scales if offsets is None else code * scales + offsets
            error = (values - numbers)[:, 0] / factor[column, column]
            corrected[:, column:end] -= error[:, None] * factor[column, column:end]
            errors[:, column - start] = error
        corrected[:, end:] -= errors @ factor[start:end, end:]
    return _joined(codes, grids, 1, bits, zero)


_Grid = tuple[torch.Tensor, torch.Tensor | None]  # scales and offsets, [out, groups]


def _joined(
    codes: torch.Tensor, grids: Sequence[_Grid], dim: int, bits: int, zero: ZeroPoint
) -> QuantisedWeight:
    """A weight from its codes and the grids of its parts, which are concatenated along ``dim``."""
    scales = torch.cat([scales for scales, _ in grids], dim)
    parts = [offsets for _, offsets in grids if offsets is not None]
    offsets = torch.cat(parts, dim) if parts else None
    return QuantisedWeight(codes.to(torch.int8), scales, bits, offsets, _limits(bits, zero)[0] == 0)


def _limits(bits: int, zero: ZeroPoint) -> tuple[int, int]:
    """The smallest and largest code; with -128 sums would overflow in some instructions."""
    if bits == 8:
        return -127, 127
    return (0, 15) if zero == "free" else (-8, 7)


def _codes(
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    bits: int,
    zero: ZeroPoint,
) -> torch.Tensor:
    shifted = values if offsets is None else values - offsets
    return (shifted / scales).round().clamp(*_limits(bits, zero))


def _best_grid(parts: torch.Tensor, bits: int, zero: ZeroPoint) -> _Grid:
    """The grid of least squared error per group of ``parts [rows, groups, group]``, float32."""
    low, high = parts.amin(-1), parts.amax(-1)
    best: _Grid | None = None
    least_error = torch.full(parts.shape[:2], torch.inf)
    for shrink in _SHRINKS[bits]:
        scales, offsets = _grid(low * shrink, high * shrink, bits, zero)
        step = scales[..., None]
        shifted = parts if offsets is None else parts - offsets[..., None]
        rounded = (shifted * step.reciprocal()).round_().clamp_(*_limits(bits, zero))
        error = _sum(rounded.mul_(step).sub_(shifted).square_())
        better = error < least_error
        least_error = torch.where(better, error, least_error)
        if best is not None:
            scales = torch.where(better, scales, best[0])
            if offsets is not None and best[1] is not None:
                offsets = torch.where(better, offsets, best[1])
        best = scales, offsets
    assert best is not None
    return best


def _sum(squares: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, a multiple of 16, in the order that the kernels use on every
    machine (csrc/rounding.h). The order of ``torch.sum`` depends on the width of the vectors."""
    lanes = squares.reshape(*squares.shape[:-1], -1, 16)
    total: torch.Tensor = lanes[..., 0, :]
    for part in range(1, lanes.shape[-2]):
        total = total + lanes[..., part, :]
    for width in (8, 4, 2, 1):
        total = total[..., :width] + total[..., width:]
    return total.squeeze(-1)


def _grid(low: torch.Tensor, high: torch.Tensor, bits: int, zero: ZeroPoint) -> _Grid:
    """The grid whose codes cover ``low`` to ``high``."""
    smallest, largest = _limits(bits, zero)
    if zero != "none":
        scales = (high - low) / (2**bits - 1)
    elif bits == 8:
        scales = torch.maximum(-low, high) / largest
    else:  # there is one more code below 0: the scale's sign gives it to the group's larger side
        scales = torch.where(-low > high, -low, -high) / (largest + 1)
    scales = torch.where(scales == 0, 1.0, scales)
    if zero == "free":
        # In float16, as in GGUF's Q4_1, unless a scale is too small or an offset too large for it.
        halves = scales.half().float()
        offsets = (low - smallest * halves).half().float()
        if bool((scales >= _SMALLEST_NORMAL_HALF).all() and torch.isfinite(offsets).all()):
            return halves, offsets
        return scales, low - smallest * scales
    scales = scales.bfloat16().float()
    if zero == "none":
        return scales, None
    points = (smallest - low / scales).round().clamp(smallest, largest)
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
    weight: torch.Tensor, bits: int, group: int, zero: ZeroPoint = "none"
) -> QuantisedWeight:
    """``nearest``, by the kernels where available: the same result in a tenth of the time."""
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
    inputs = DTYPES[weight.dtype], weight.data_ptr(), rows, columns, group, bits
    outputs = pointer(codes), pointer(scales), pointer(offsets)
    zero_points = _KERNEL_ZERO_POINTS[zero]
    check(kernels.pl_quantise(*inputs, zero_points, *outputs, torch.get_num_threads()))
    return QuantisedWeight(codes, scales, bits, offsets, _limits(bits, zero)[0] == 0)

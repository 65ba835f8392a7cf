"""From a weight to codes: nearest, on the grid that loses least, or by GPTQ.

GPTQ (Frantar et al. 2023, arXiv:2210.17323, algorithm 1) rounds the inputs of a layer one after the
other and lets those that are still to come make up for the error, weighted by how the layer's
inputs go together: ``H = X^T X`` over calibration text. Grids are chosen per group before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from paceline.errors import ConfigError
from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import DTYPES, check, library
from paceline.model.quantised.weights import QuantisedWeight

# Where the codes of a group may stand: around 0; around a whole multiple of the scale, as most
# formats store it; or anywhere.
Zero = Literal["none", "whole", "free"]
_IN_KERNELS: dict[Zero, int] = {"none": 0, "whole": 1, "free": 2}

_SHRINKS = {  # of the group's range; 256 codes gain nothing where much is cut off
    4: tuple(1 - 0.025 * step for step in range(17)),
    8: tuple(1 - 0.025 * step for step in range(5)),
}
_CACHED = 1 << 16  # numbers
_DAMPING = 0.01  # of the mean of H's diagonal, as in the paper
_BLOCK = 128  # columns whose updates of the columns behind are made at once


@dataclass(frozen=True)
class Grid:
    """Codes stand for scale * code + offset; ``scales``, ``offsets`` or None ``[out, groups]``."""

    bits: int
    scales: torch.Tensor
    offsets: torch.Tensor | None
    from_zero: bool = False  # codes of four bits are 0 to 15

    def codes(self, values: torch.Tensor) -> torch.Tensor:
        """Nearest codes (float) of ``values [out, groups, ...]``."""
        scales = self._scales_for(values)
        if self.offsets is not None:
            values = values - self.offsets.reshape(scales.shape)
        codes: torch.Tensor = (values / scales).round().clamp(*self._limits)
        return codes

    def error(self, parts: torch.Tensor) -> torch.Tensor:
        """Sum of squares ``[out, groups]`` that nearest codes of ``parts`` leave, but for ties."""
        scales = self.scales[..., None]
        wanted = parts if self.offsets is None else parts - self.offsets[..., None]
        rounded = (wanted * scales.reciprocal()).round_().clamp_(*self._limits)
        return _sum(rounded.mul_(scales).sub_(wanted).square_())

    @property
    def _limits(self) -> tuple[int, int]:
        least = 0 if self.from_zero else _least(self.bits)
        return least, least + 15 if self.bits == 4 else 127

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        scales = self._scales_for(codes)
        numbers = codes * scales
        return numbers if self.offsets is None else numbers + self.offsets.reshape(scales.shape)

    def _scales_for(self, values: torch.Tensor) -> torch.Tensor:
        """The scales with as many dimensions as ``values`` have."""
        more = values.dim() - self.scales.dim()
        return self.scales.reshape(*self.scales.shape, *[1] * more)


def _sum(squares: torch.Tensor) -> torch.Tensor:
    """Over the last dimension, a multiple of 16, in an order that is the same on every machine and
    in the kernels (csrc/rounding.h): torch's own depends on the width of the vectors that it has.
    """
    lanes = squares.reshape(*squares.shape[:-1], -1, 16)
    total: torch.Tensor = lanes[..., 0, :]
    for part in range(1, lanes.shape[-2]):
        total = total + lanes[..., part, :]
    for width in (8, 4, 2, 1):
        total = total[..., :width] + total[..., width:]
    return total.squeeze(-1)


def _least(bits: int) -> int:
    """Eight bits leave -128 out: products of two such sums would overflow in some instructions."""
    return -8 if bits == 4 else -127


def best_grid(weight: torch.Tensor, bits: int, group: int, zero: Zero) -> Grid:
    """Of some shrunk ranges of each group, that of least squared error of rounding.

    But for a "free" zero, scales are numbers that bf16 holds: checkpoints store them in it. Raises
    ConfigError where ``group`` does not divide the inputs of ``weight [out, in]``.
    """
    if weight.shape[1] % group:
        raise ConfigError(
            f"a weight of {weight.shape[1]} inputs does not divide into groups of {group}; "
            "choose a group that divides it"
        )
    parts = weight.reshape(len(weight), -1, group)
    rows = max(1, _CACHED // weight.shape[1])
    grids = [_best(part.float(), bits, zero) for part in torch.split(parts, rows)]
    offsets = [grid.offsets for grid in grids if grid.offsets is not None]
    scales = torch.cat([grid.scales for grid in grids])
    return Grid(bits, scales, torch.cat(offsets) if offsets else None, grids[0].from_zero)


def _best(parts: torch.Tensor, bits: int, zero: Zero) -> Grid:
    """``parts``: float32 ``[rows, groups, group]``, few enough to stay in a cache meanwhile."""
    low, high = parts.amin(-1), parts.amax(-1)
    best: Grid | None = None
    least = torch.full(parts.shape[:2], torch.inf)
    for shrink in _SHRINKS[bits]:
        grid = _grid(low * shrink, high * shrink, bits, zero)
        error = grid.error(parts)
        better = error < least
        least = torch.where(better, error, least)
        best = grid if best is None else _mixed(better, grid, best)
    assert best is not None
    return best


_LEAST_HALF = 2**-14  # of normal numbers: smaller ones lose digits


def _free(bits: int, low: torch.Tensor, scales: torch.Tensor) -> Grid:
    """Scales and offsets in half precision, as they are read with every weight (and as GGUF's Q4_1
    has them); in float32 where a scale is too small for that, or an offset too large."""
    least = 0 if bits == 4 else _least(bits)
    halves = scales.half().float()
    offsets = (low - least * halves).half().float()
    if not bool((scales >= _LEAST_HALF).all() and torch.isfinite(offsets).all()):
        halves, offsets = scales, low - least * scales
    return Grid(bits, halves, offsets, bits == 4)


def _grid(low: torch.Tensor, high: torch.Tensor, bits: int, zero: Zero) -> Grid:
    most = 2 ** (bits - 1) - 1
    if zero == "none":
        if bits == 8:
            scales = torch.maximum(-low, high) / most
        else:  # one code more below 0: for the larger side of the group, whose sign the scale has
            scales = torch.where(-low > high, -low, -high) / (most + 1)
    else:
        scales = (high - low) / (2**bits - 1)
    scales = torch.where(scales == 0, 1.0, scales)
    if zero == "free":
        return _free(bits, low, scales)
    scales = scales.bfloat16().float()
    if zero == "none":
        return Grid(bits, scales, None)
    points = (_least(bits) - low / scales).round().clamp(_least(bits), most)
    return Grid(bits, scales, -points * scales)


def _mixed(better: torch.Tensor, grid: Grid, best: Grid) -> Grid:
    scales = torch.where(better, grid.scales, best.scales)
    if grid.offsets is None or best.offsets is None:
        return Grid(grid.bits, scales, None)
    offsets = torch.where(better, grid.offsets, best.offsets)
    return Grid(grid.bits, scales, offsets, grid.from_zero)


def nearest(weight: torch.Tensor, bits: int, group: int, zero: Zero = "none") -> QuantisedWeight:
    """Each number to the nearest code. ``weight`` ``[out, in]``; ``group`` inputs share a scale."""
    grid = best_grid(weight, bits, group, zero)
    codes = grid.codes(weight.float().reshape(len(weight), -1, group))
    codes = codes.flatten(1).to(torch.int8)
    return QuantisedWeight(codes, grid.scales, bits, grid.offsets, grid.from_zero)


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, bits: int, group: int, zero: Zero = "none"
) -> QuantisedWeight:
    """As ``nearest``, the error of each input made up for by those behind it.

    ``hessian`` ``[in, in]`` float32: the sum over calibration rows of ``x^T x``. Grids are those
    of the weights as they are when their group is reached.
    """
    left = weight.float().clone()
    factor = _inverse_factor(hessian)
    left[:, hessian.diagonal() == 0] = 0  # an input that never speaks may have any weight
    columns = left.shape[1]
    codes = torch.empty_like(left)
    grids: list[Grid] = []
    for start in range(0, columns, _BLOCK):
        end = min(start + _BLOCK, columns)
        errors = torch.empty(len(left), end - start)
        for column in range(start, end):
            if column % group == 0:
                grids.append(best_grid(left[:, column : column + group], bits, group, zero))
            values = left[:, column : column + 1]
            codes[:, column : column + 1] = code = grids[-1].codes(values)
            error = (values - grids[-1].values(code))[:, 0] / factor[column, column]
            left[:, column:end] -= error[:, None] * factor[column, column:end]
            errors[:, column - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    offsets = [grid.offsets for grid in grids if grid.offsets is not None]
    return QuantisedWeight(
        codes.to(torch.int8),
        torch.cat([grid.scales for grid in grids], 1),
        bits,
        torch.cat(offsets, 1) if offsets else None,
        grids[0].from_zero,
    )


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
    """``nearest``, by the kernels where they can be had.

    SmolLM2's matrices take them a tenth of torch's time. ``weight`` ``[out, in]``.
    """
    rows, columns = weight.shape
    lanes = 16  # that a group's inputs are summed in
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
    check(
        kernels.pl_round(
            DTYPES[weight.dtype],
            weight.data_ptr(),
            *(rows, columns, group, bits, _IN_KERNELS[zero]),
            codes.data_ptr(),
            scales.data_ptr(),
            None if offsets is None else offsets.data_ptr(),
            torch.get_num_threads(),
        )
    )
    return QuantisedWeight(codes, scales, bits, offsets, zero == "free" and bits == 4)

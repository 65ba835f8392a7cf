"""A linear layer's weight in 8 or 4 bits, and the exact arithmetic of a product with it.

::

    weight[n, k]  =  codes[n, k] * scales[n, g] + offsets[n, g]           g = k // group

    x[t, k]      ~=  x_codes[t, k] * x_scales[t, h]                       h = k // span

    y[t, n]  =  sum over h, in order, of  (s * scales[n, g] + x_sums * offsets[n, g]) * x_scales
    s[t, n, h]     =  sum over the k of span h of  codes[n, k] * x_codes[t, k]
    x_sums[t, h]   =  sum over the k of span h of  x_codes[t, k]

===============  =======================  =============================================
                 16-bit activations       8-bit activations
===============  =======================  =============================================
used for         8-bit weights whose      all other weights, and the layers in
                 groups are multiples     ``INT8_ACTIVATION_LAYERS``
                 of 64
``x_codes``      -32512 .. 32512          -127 .. 127
``x_scales``     one for the whole row,   one for each 32 inputs
                 applied to the final sum
span             64 inputs                32 inputs, or 16 for weights in groups of 16
===============  =======================  =============================================

``s`` and ``x_sums`` are sums of integers: exact in any order, and rounded to float32 once. Spans
are added in order, in float32. So a row of ``y`` depends only on its row of ``x``, whatever else is
in the batch (the same-bits guarantee). ``QuantisedLinear`` computes this in torch; the kernels are
tested against it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.errors import ModelLoadError

ROW_GROUP = 32  # 8-bit activations that share a scale; also the group size of 4-bit weights
_INT16_SPAN = 64
# Layers whose activations have 8 bits even if their weights have 8: their inputs are normalised.
# They are 60 % of SmolLM2. Its perplexity rises by 0.15 % (8-bit activations in all layers: 1 %),
# and VNNI multiplies these layers 1.5 times as fast.
INT8_ACTIVATION_LAYERS = ("gate_proj", "up_proj", "gate_up_proj", "lm_head")
BITS = {"int8": 8, "int4": 4}
_MAX_SUMS = 1 << 24  # elements of ``s`` computed at once: limits the memory that a large head needs


@dataclass(frozen=True)
class QuantisedWeight:
    """A quantised matrix: ``codes`` int8 ``[out, in]``; ``scales`` and ``offsets`` float32
    ``[out, groups]``.

    The inputs divide into ``groups`` equal groups; with one group there is a scale per output
    channel. Without ``offsets`` the codes are symmetric around 0. An integer zero point ``z``,
    which most formats have, is an offset of ``-z * scale``. In GGUF's Q4_1 and Q4_K offsets are any
    number, and 4-bit codes are ``unsigned``: 0 to 15 instead of -8 to 7. ``e2m1``: 4-bit codes are
    floats, as in MXFP4, times two: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
    ``int8_activations``: use 8-bit activations even with 8-bit weights in large groups."""

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    offsets: torch.Tensor | None = None
    unsigned: bool = False
    int8_activations: bool = False
    e2m1: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def int16_activations(self) -> bool:
        """Whether products use 16-bit activations; otherwise they use 8-bit ones."""
        return self.bits == 8 and not self.int8_activations and self.group % _INT16_SPAN == 0

    def linear(self, name: str, bias: torch.Tensor | None) -> QuantisedLinear:
        """The layer ``name`` with this weight; some layers take 8-bit activations."""
        narrow = name.rpartition(".")[2] in INT8_ACTIVATION_LAYERS
        return QuantisedLinear(replace(self, int8_activations=narrow), bias)

    @property
    def span(self) -> int:
        """Inputs whose products are summed as integers."""
        return _INT16_SPAN if self.int16_activations else math.gcd(self.group, ROW_GROUP)

    @property
    def nbytes(self) -> int:
        """Bytes that a product must read: codes in ``bits`` bits each, scales and offsets."""
        offsets = 0 if self.offsets is None else self.offsets.numel()
        return self.codes.numel() * self.bits // 8 + 4 * (self.scales.numel() + offsets)

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantised weight ``[out, in]``."""
        numbers = self.codes.float() * self.scales.repeat_interleave(self.group, 1)
        if self.offsets is not None:
            numbers += self.offsets.repeat_interleave(self.group, 1)
        return numbers.to(dtype)

    def rows(self, part: slice | torch.Tensor) -> QuantisedWeight:
        """The outputs (rows) selected by ``part``, in its order."""
        offsets = None if self.offsets is None else self.offsets[part]
        return replace(self, codes=self.codes[part], scales=self.scales[part], offsets=offsets)

    @property
    def has_supported_groups(self) -> bool:
        """Whether products with activations quantised in groups of 32 are possible."""
        least = ROW_GROUP // 2 if self.bits == 8 else ROW_GROUP
        whole = self.group % ROW_GROUP == 0 or self.group == least
        return whole and self.shape[1] % ROW_GROUP == 0

    def expanded(self, bits: int, group: int, offsets: bool) -> QuantisedWeight:
        """The same numbers in a larger format: at least as many bits, smaller groups, and
        ``offsets`` (zeros if there were none)."""
        repeat = self.group // group
        scales = self.scales.repeat_interleave(repeat, 1)
        added = torch.zeros_like(scales) if offsets else None
        if self.offsets is not None:
            added = self.offsets.repeat_interleave(repeat, 1)
        four = bits == 4
        kinds: Any = {"unsigned": four and self.unsigned, "e2m1": four and self.e2m1}
        return replace(self, scales=scales, bits=bits, offsets=added, **kinds)

    def check(self, name: str) -> QuantisedWeight:
        """Returns ``self``. Raises ModelLoadError, naming the tensor, if scales or zero points have
        the wrong shape, or a scale is zero or not finite."""
        columns, groups = self.codes.shape[1], self.scales.shape[1]
        if self.scales.shape[0] != self.codes.shape[0] or groups == 0 or columns % groups:
            raise ModelLoadError(
                f"the scales of {name} are {list(self.scales.shape)}, which divides no weight of "
                f"{list(self.codes.shape)} into equal groups; the file is damaged or mixes formats"
            )
        if self.offsets is not None and self.offsets.shape != self.scales.shape:
            raise ModelLoadError(
                f"{name} has zero points {list(self.offsets.shape)} for scales "
                f"{list(self.scales.shape)}; the file is damaged or mixes formats"
            )
        bad = ~torch.isfinite(self.scales) | (self.scales == 0)
        if bool(bad.any()):
            row, group = (int(index) for index in bad.nonzero()[0])
            raise ModelLoadError(
                f"the scale of {name} at row {row}, group {group} is "
                f"{float(self.scales[row, group]):g}; quantise the model again"
            )
        return self


class Float8Weight(NamedTuple):
    """A matrix of 8-bit floats: ``numbers [out, in]``, and ``scales``, by which blocks of ``block``
    outputs and inputs are multiplied."""

    numbers: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The dequantised weight ``[out, in]``."""
        (rows, columns), (height, width) = self.numbers.shape, self.block
        scales = self.scales.repeat_interleave(height, 0)[:rows]
        scales = scales.repeat_interleave(width, 1)[:, :columns]
        return (self.numbers.float() * scales).to(dtype)

    def check(self, name: str) -> Float8Weight:
        """Returns ``self``. Raises ModelLoadError, naming the tensor, if its parts do not fit."""
        shape = [
            -(-size // part) for size, part in zip(self.numbers.shape, self.block, strict=True)
        ]
        if self.numbers.dtype != torch.float8_e4m3fn or list(self.scales.shape) != shape:
            raise ModelLoadError(
                f"{name} is {self.numbers.dtype} {list(self.numbers.shape)} with scales "
                f"{list(self.scales.shape)}, where float8_e4m3fn with scales {shape} is expected; "
                "the file is damaged or mixes formats"
            )
        return self


def quantise_rows(x: torch.Tensor, int16: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise activations ``[T, in]`` symmetrically: codes ``[T, in]`` (integers as float32) and
    scales ``[T, in / 32]``; with ``int16`` 16-bit codes and scales ``[T, 1]``. A scale is the
    largest magnitude of its group over the largest code, and 0 for a group of zeros."""
    largest = 127 * 256 if int16 else 127
    parts = x.float().reshape(len(x), -1, x.shape[1] if int16 else ROW_GROUP)
    scales = parts.abs().amax(-1) / largest
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = (parts * inverse[..., None]).round().clamp(-largest, largest)
    return codes.flatten(1), scales


@dataclass(frozen=True)
class MatrixSize:
    """A linear layer's size in memory: ``bits`` per weight, ``bytes`` with scales and padding."""

    bits: int
    elements: int
    bytes: int


class LinearBase(nn.Module, ABC):
    """A linear layer with its matrix in a layout of our own; reading ``weight`` computes it."""

    in_features: int
    out_features: int
    bias: torch.Tensor | None

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """A dense copy of the matrix, made at every access."""

    @abstractmethod
    def matrix_size(self) -> MatrixSize:
        """The matrix's bits per weight and size in memory."""


class QuantisedLinear(LinearBase):
    """A linear layer with a quantised weight, which ``has_supported_groups``; the module docstring
    has the formulas."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._quantised = weight
        self.bias = None if bias is None else bias.detach()

    @property
    def quantised(self) -> QuantisedWeight:
        return self._quantised

    @property
    def int16_activations(self) -> bool:
        return self.quantised.int16_activations

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy ``[out, in]``, float32, made at every access."""
        return self.quantised.dense()

    def matrix_size(self) -> MatrixSize:
        quantised = self.quantised
        scales = [part for part in (quantised.scales, quantised.offsets) if part is not None]
        size = quantised.codes.nbytes + sum(part.nbytes for part in scales)
        return MatrixSize(quantised.bits, quantised.codes.numel(), size)

    def plain(self) -> nn.Linear:
        """An ``nn.Linear`` with the dequantised weight, float32."""
        return plain_linear(self.weight, None if self.bias is None else self.bias.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        result = quantised_product(rows, self.quantised)
        if self.bias is not None:
            result += self.bias.float()
        return result.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """An ``nn.Linear`` that uses these tensors, ``[out, in]`` and ``[out]``, without copying."""
    linear = nn.Linear(1, 1, bias=False)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def quantised_product(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """``[T, out]`` float32 of ``x [T, in]``, by the formulas of the module docstring."""
    codes, x_scales = quantise_rows(x, weight.int16_activations)
    size, spans = weight.span, weight.shape[1] // weight.span
    # Sums of integers in floating point are exact below 2^24 in float32, 2^53 in float64.
    dtype = torch.float64 if weight.int16_activations else torch.float32
    split = codes.to(dtype).reshape(len(x), spans, size)
    x_sums = split.sum(-1).float()
    result = torch.empty(len(x), weight.shape[0], device=x.device)
    step = max(1, _MAX_SUMS // (max(1, len(x)) * spans))
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        part = weight.rows(rows)
        matrix = part.codes.to(dtype).reshape(-1, spans, size)
        sums = torch.einsum("tgk,ngk->gtn", split, matrix).float()
        total = torch.zeros(len(x), len(matrix), device=x.device)
        for span in range(spans):
            group = span * size // part.group
            term = sums[span] * part.scales[:, group]
            if part.offsets is not None:
                term += x_sums[:, span, None] * part.offsets[:, group]
            total += (
                term
                if weight.int16_activations
                else term * x_scales[:, span * size // ROW_GROUP, None]
            )
        result[:, rows] = total * x_scales if weight.int16_activations else total
    return result


def in_common_format(weights: Sequence[QuantisedWeight]) -> list[QuantisedWeight]:
    """Weights that share an input, converted without loss to one format, for packing them into one
    matrix: 4-bit weights may become 8-bit ones, and groups smaller."""
    if len({(w.bits, w.group, w.offsets is None, w.unsigned, w.e2m1) for w in weights}) < 2:
        return list(weights)
    group = math.gcd(*(weight.group for weight in weights))
    bits = max(weight.bits for weight in weights)
    if len({(weight.unsigned, weight.e2m1) for weight in weights}) > 1 or group % ROW_GROUP:
        bits = 8
    offsets = any(weight.offsets is not None for weight in weights)
    return [weight.expanded(bits, group, offsets) for weight in weights]


def is_plain(weight: torch.Tensor) -> bool:
    """Whether this is an ordinary tensor, not a subclass of a library such as torchao. Only its
    type is examined, as such subclasses cannot even be detached in inference mode."""
    return type(weight) in (torch.Tensor, nn.Parameter)

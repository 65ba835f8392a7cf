"""A linear layer's weight in 8 or 4 bits, and the arithmetic that is meant by it.

::

    weight[n, k]  =  codes[n, k] * scales[n, g] + offsets[n, g]           g = k // group

    x[t, k]      ~=  x_codes[t, k] * x_scales[t, h]

    y[t, n]  =  sum over h, in order, of  (s * scales[n, g] + x_sums * offsets[n, g]) * x_scales
    s[t, n, h]     =  sum over the k of span h of  codes[n, k] * x_codes[t, k]
    x_sums[t, h]   =  sum over the k of span h of  x_codes[t, k]

===============  =======================  =============================================
                 weights in 8 bits whose
                 groups divide into 64,
                 but ``NARROW`` layers    others
===============  =======================  =============================================
``x_codes``      -32512 .. 32512          -127 .. 127
``x_scales``     one for the row, by      one for each 32 inputs
                 which the whole sum is
                 multiplied at last
a span           64 inputs                32, or 16 where groups are so small
===============  =======================  =============================================

``s`` and ``x_sums`` are sums of integers: exact in any order, rounded to float32 once. Spans are
added in order, in float32. So a row of ``y`` depends on its row of ``x`` alone, whatever the batch
(the same-bits guarantee). ``QuantisedLinear`` computes this in torch; kernels are compared to it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from paceline.errors import ModelLoadError

ROW_GROUP = 32  # activations of 8 bits that share a scale; also the group of four-bit weights
_WIDE_SPAN = 64
# Layers whose activations have 8 bits beside weights of 8, as they read normed rows. They are 60 %
# of SmolLM2: perplexity rises by 0.15 % (all layers: 1 %), VNNI multiplies them 1.5 times as fast.
NARROW = ("gate_proj", "up_proj", "gate_up_proj", "lm_head")
BITS = {"int8": 8, "int4": 4}
_MOST_SUMS = 1 << 24  # elements of one block of ``s``, so that a large head needs no gigabytes


@dataclass(frozen=True)
class QuantisedWeight:
    """``codes`` int8 ``[out, in]``; ``scales`` and ``offsets`` float32 ``[out, groups]``.

    ``groups`` divides ``in`` into equal parts; one group is a scale per output channel. Without
    ``offsets`` the codes are symmetric around 0. A whole zero point ``z``, as most formats have it,
    is an offset of ``-z * scale``; GGUF's Q4_1 and Q4_K have offsets that are no multiple, and
    four-bit codes ``from_zero``: 0 to 15 instead of -8 to 7. ``narrow``: activations of 8 bits
    beside weights of 8, whatever their groups."""

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int
    offsets: torch.Tensor | None = None
    from_zero: bool = False
    narrow: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def wide(self) -> bool:
        """Whether it is multiplied with activations of 16 bits."""
        return self.bits == 8 and not self.narrow and self.group % _WIDE_SPAN == 0

    def of_layer(self, name: str) -> QuantisedWeight:
        """The same for the layer of this name, whose last part says whether it is ``narrow``."""
        return replace(self, narrow=name.rpartition(".")[2] in NARROW)

    @property
    def span(self) -> int:
        """Inputs whose products are summed as integers."""
        return _WIDE_SPAN if self.wide else math.gcd(self.group, ROW_GROUP)

    @property
    def nbytes(self) -> int:
        """Bytes that a product has to read: codes at their own width, scales and offsets."""
        offsets = 0 if self.offsets is None else self.offsets.numel()
        return self.codes.numel() * self.bits // 8 + 4 * (self.scales.numel() + offsets)

    def dense(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The numbers that the codes stand for, ``[out, in]``."""
        numbers = self.codes.float() * self.scales.repeat_interleave(self.group, 1)
        if self.offsets is not None:
            numbers += self.offsets.repeat_interleave(self.group, 1)
        return numbers.to(dtype)

    def rows(self, part: slice | torch.Tensor) -> QuantisedWeight:
        """Some of its outputs, or all in another order."""
        offsets = None if self.offsets is None else self.offsets[part]
        return replace(self, codes=self.codes[part], scales=self.scales[part], offsets=offsets)

    @property
    def fits(self) -> bool:
        """Whether activations in groups of 32 can be multiplied with it."""
        least = ROW_GROUP // 2 if self.bits == 8 else ROW_GROUP
        whole = self.group % ROW_GROUP == 0 or self.group == least
        return whole and self.shape[1] % ROW_GROUP == 0

    def widened(self, bits: int, group: int, offsets: bool) -> QuantisedWeight:
        """The same numbers in as many bits or more, in smaller groups, with offsets if wanted."""
        repeat = self.group // group
        scales = self.scales.repeat_interleave(repeat, 1)
        added = torch.zeros_like(scales) if offsets else None
        if self.offsets is not None:
            added = self.offsets.repeat_interleave(repeat, 1)
        from_zero = bits == 4 and self.from_zero
        return replace(self, scales=scales, bits=bits, offsets=added, from_zero=from_zero)

    def check(self, name: str) -> QuantisedWeight:
        """Returns itself. Raises ModelLoadError that names the tensor if it can be no weight."""
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


def quantise_rows(x: torch.Tensor, wide: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[T, in]`` (integers as float32) and scales ``[T, in / 32]`` of activations; if
    ``wide``, codes of 16 bits and scales ``[T, 1]``. Symmetric: a scale is the largest magnitude
    over the largest code; a group of zeros has the scale 0 and codes 0."""
    most = 127 * 256 if wide else 127
    parts = x.float().reshape(len(x), -1, x.shape[1] if wide else ROW_GROUP)
    scales = parts.abs().amax(-1) / most
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    codes = (parts * inverse[..., None]).round().clamp(-most, most)
    return codes.flatten(1), scales


@dataclass(frozen=True)
class MatrixSize:
    """One linear layer in memory: bits of a number or code, ``bytes`` with scales and padding."""

    bits: int
    elements: int
    bytes: int


class LinearBase(nn.Module, ABC):
    """A linear layer with its matrix in another layout; ``weight`` is computed when read."""

    in_features: int
    out_features: int
    bias: torch.Tensor | None

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """A dense copy of the matrix; costs memory and time."""

    @abstractmethod
    def matrix_size(self) -> MatrixSize:
        """Its bits and size."""


class QuantisedLinear(LinearBase):
    """An ``nn.Linear`` with a quantised weight; the module docstring has the formulas."""

    def __init__(self, weight: QuantisedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.quantised = weight
        self.bias = None if bias is None else bias.detach()
        if not weight.fits:
            raise ModelLoadError(
                f"a weight of {self.in_features} inputs in groups of {weight.group} cannot be "
                f"multiplied in groups of {ROW_GROUP}; leave it unquantised"
            )

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy ``[out, in]``, float32; costs memory and time."""
        return self.quantised.dense()

    def matrix_size(self) -> MatrixSize:
        quantised = self.quantised
        scales = [part for part in (quantised.scales, quantised.offsets) if part is not None]
        size = quantised.codes.nbytes + sum(part.nbytes for part in scales)
        return MatrixSize(quantised.bits, quantised.codes.numel(), size)

    def plain(self) -> nn.Linear:
        """An ``nn.Linear`` of the dequantised numbers, float32."""
        return plain_linear(self.weight, None if self.bias is None else self.bias.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        result = quantised_product(rows, self.quantised)
        if self.bias is not None:
            result += self.bias.float()
        return result.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        w = self.quantised
        return f"in={self.in_features}, out={self.out_features}, bits={w.bits}, group={w.group}"


def plain_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Linear:
    """A layer that holds these tensors, ``[out, in]`` and ``[out]``, without a copy."""
    linear = nn.Linear(1, 1, bias=False)
    linear.out_features, linear.in_features = weight.shape
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def quantised_product(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """``[T, out]`` float32 of ``x [T, in]``, by the formulas of the module docstring."""
    codes, x_scales = quantise_rows(x, weight.wide)
    size, spans = weight.span, weight.shape[1] // weight.span
    # Whole numbers: a product of these is exact in any order below 2^24 in float32, 2^53 in double.
    number = torch.float64 if weight.wide else torch.float32
    split = codes.to(number).reshape(len(x), spans, size)
    x_sums = split.sum(-1).float()
    result = torch.empty(len(x), weight.shape[0], device=x.device)
    step = max(1, _MOST_SUMS // (max(1, len(x)) * spans))
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        part = weight.rows(rows)
        matrix = part.codes.to(number).reshape(-1, spans, size)
        sums = torch.einsum("tgk,ngk->gtn", split, matrix).float()
        total = torch.zeros(len(x), len(matrix), device=x.device)
        for span in range(spans):
            group = span * size // part.group
            term = sums[span] * part.scales[:, group]
            if part.offsets is not None:
                term += x_sums[:, span, None] * part.offsets[:, group]
            total += term if weight.wide else term * x_scales[:, span * size // ROW_GROUP, None]
        result[:, rows] = total * x_scales if weight.wide else total
    return result


def common_form(weights: Sequence[QuantisedWeight]) -> list[QuantisedWeight]:
    """Weights of one input in one form, without loss: those of four bits may be widened."""
    if len({(w.bits, w.group, w.offsets is None, w.from_zero) for w in weights}) < 2:
        return list(weights)
    group = math.gcd(*(weight.group for weight in weights))
    bits = max(weight.bits for weight in weights)
    if len({weight.from_zero for weight in weights}) > 1 or group % ROW_GROUP:
        bits = 8
    offsets = any(weight.offsets is not None for weight in weights)
    return [weight.widened(bits, group, offsets) for weight in weights]


def is_plain(weight: torch.Tensor) -> bool:
    """Whether these are numbers, not a tensor subclass of a library such as torchao's, which cannot
    even be detached in inference mode: so the type alone is looked at."""
    return type(weight) in (torch.Tensor, nn.Parameter)

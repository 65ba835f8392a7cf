"""Linear products whose weights are laid out for the CPU once, not at every call.

``F.linear`` re-orders a bf16 weight into oneDNN's blocked layout on each call, which for a few
rows costs more than the product, and in float32 calls a library whose products of 2 to 16 rows
cost two to three times one row. Here the order is made at load and the plain weight is freed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from paceline.model.quantised.weights import QuantisedLinear

Product = Callable[[torch.Tensor], torch.Tensor]  # [..., in] -> [..., out]

# Rows for which oneDNN chooses the layout. Measured from 1 to 512: the layout is the same.
_ROWS_HINT = 8


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether prepacking gains: dense matrices on an x86 CPU, bf16 only where it is native.

    Measured on one core (Zen 4), 6144 x 1152, microseconds plain / prepacked: bf16 with 1, 5 and
    512 rows 1321 / 788, 1470 / 673, 34200 / 32545; float32 with 1, 5, 64 rows 1849 / 1850, 4492 /
    1622, 14220 / 8703.
    """
    if weight.device.type != "cpu" or weight.layout != torch.strided or weight.dim() != 2:
        return False
    if not is_plain(weight):
        return False
    if platform.machine() not in ("x86_64", "AMD64") or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def is_plain(weight: torch.Tensor) -> bool:
    """Whether these are numbers, not a tensor of a library that multiplies in its own way.

    By its type alone: a parameter of such a tensor has that tensor's, and torchao's cannot even be
    detached in inference mode.
    """
    return type(weight) in (torch.Tensor, nn.Parameter)


def _product(prepacked: torch.Tensor, bias: torch.Tensor | None) -> Product:
    linear: Any = torch.ops.mkldnn._linear_pointwise.default

    def product(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = linear(x, prepacked, bias, "none", [], "")
        return result

    return product


class PrepackedLinear(nn.Module):
    """Stands for an ``nn.Linear``; the only copy of its weight is the prepacked one."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``weight`` ``[out, in]``, read once and not kept; ``bias`` ``[out]`` or None."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.detach()
        dense = weight.detach().contiguous()
        self.prepacked: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(dense, _ROWS_HINT)
        self.product = _product(self.prepacked, self.bias)

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy, exactly the weight that was prepacked; costs memory and time."""
        return self.prepacked.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.out_features}, bias={self.bias is not None}"


class MergedLinear(PrepackedLinear):
    """Several products of one input as one: their rows follow each other in one weight."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__(*cat_linears(linears))
        self.sizes = [linear.out_features for linear in linears]
        self._input: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Product ``index``. The first to be asked with a new input computes all of them."""
        if self._input is not x or index not in self._parts:
            self._parts = dict(enumerate(torch.split(self.product(x), self.sizes, -1)))
            self._input = x
        result = self._parts.pop(index)
        if not self._parts:
            self._input = None
        return result


class MergedPart(nn.Module):
    """One of the products of a MergedLinear, in the place of its ``nn.Linear``."""

    def __init__(self, merged: MergedLinear, index: int) -> None:
        super().__init__()
        self.merged = merged
        self.index = index
        self.in_features = merged.in_features
        self.out_features = merged.sizes[index]

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy, exactly the weight that was prepacked; costs memory and time."""
        return torch.split(self.merged.weight, self.merged.sizes)[self.index]

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self.merged.bias
        return None if bias is None else torch.split(bias, self.merged.sizes)[self.index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.merged.part(self.index, x)


def cat_linears(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights and biases one below the other; all of them have a bias, or none has."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears)), "either every product has a bias or none"
    return weight, torch.cat(biases) if biases else None


def mergeable(linears: Sequence[object]) -> TypeGuard[Sequence[nn.Linear]]:
    """Whether these are plain ``nn.Linear`` that take the same input width and kind of bias."""
    plain = [linear for linear in linears if type(linear) is nn.Linear and is_plain(linear.weight)]
    return len(plain) == len(linears) and (
        len({(p.in_features, p.weight.dtype, p.weight.device, p.bias is None) for p in plain}) == 1
    )


def product_of(linear: nn.Module) -> Product:
    """The product that a (prepacked or plain) linear module computes, without module overhead."""
    if isinstance(linear, PrepackedLinear):
        return linear.product
    if isinstance(linear, QuantisedLinear):
        return linear.forward
    assert type(linear) is nn.Linear, f"{type(linear).__name__} is no linear product"
    weight, bias = linear.weight.detach(), linear.bias
    return lambda x: F.linear(x, weight, bias)


def merged_product(linears: Sequence[nn.Module]) -> Product:
    """One product for several modules with one input.

    Plain modules are made views of one merged weight, so that nothing is stored twice.
    """
    first = linears[0]
    if isinstance(first, MergedPart):
        assert all(isinstance(p, MergedPart) and p.merged is first.merged for p in linears)
        return first.merged.product
    if any(isinstance(linear, QuantisedLinear) for linear in linears):
        parts = [product_of(linear) for linear in linears]
        return lambda x: torch.cat([part(x) for part in parts], -1)
    plain = [linear for linear in linears if type(linear) is nn.Linear]
    assert len(plain) == len(linears)
    weight, bias = cat_linears(plain)
    row = 0
    for linear in plain:
        rows = slice(row, row + linear.out_features)
        linear.weight.data = weight[rows]
        if bias is not None:
            linear.bias.data = bias[rows]
        row += linear.out_features
    return lambda x: F.linear(x, weight, bias)

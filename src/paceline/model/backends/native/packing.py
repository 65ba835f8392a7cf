"""Weights in the layout of the kernels, and the modules that stand in for the plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.model.backends.native.library import (
    DTYPES,
    GATE,
    PLAIN,
    UP,
    CWeight,
    check,
    library,
)

_PANEL = 32


@dataclass(frozen=True)
class Packed:
    """One or more dense matrices of the same input as the kernels read them (csrc/products.h)."""

    data: torch.Tensor  # bytes
    bias: torch.Tensor | None  # float32, one for each packed output
    outputs: int  # as packed: the two of a gated pair count once
    inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, linears: Sequence[nn.Linear], gated: bool = False) -> Packed:
        """The matrices one below the other; ``gated``: two, their outputs side by side."""
        first = linears[0].weight
        inputs, dtype = first.shape[1], first.dtype
        rows = sum(linear.out_features for linear in linears)
        padded = 2 * -(-rows // 2 // 16) * 16 if gated else -(-rows // _PANEL) * _PANEL
        size = library().pl_packed_bytes(DTYPES[dtype], padded, inputs)
        data = torch.zeros(size, dtype=torch.uint8)
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.zeros(padded)
        at = 0
        for place, linear in zip((GATE, UP) if gated else (PLAIN,) * 3, linears, strict=False):
            weight = linear.weight.detach().contiguous()
            count = linear.out_features
            code = DTYPES[dtype]
            begin = 0 if gated else at
            library().pl_pack(code, place, weight.data_ptr(), count, inputs, begin, data.data_ptr())
            if bias is not None and linear.bias is not None:
                bias[_lanes(place, begin, count)] = linear.bias.detach().float()
            at += count
        return cls(data, bias, rows // 2 if gated else rows, inputs, dtype)

    def struct(self) -> CWeight:
        bias = None if self.bias is None else self.bias.data_ptr()
        return CWeight(self.data.data_ptr(), bias, self.outputs, self.inputs)

    def dense(self, place: int, first: int, rows: int) -> torch.Tensor:
        """A copy of ``rows`` outputs from ``first`` on, exactly what was packed."""
        out = torch.empty(rows, self.inputs, dtype=self.dtype)
        code, data = DTYPES[self.dtype], self.data.data_ptr()
        library().pl_unpack(code, place, out.data_ptr(), rows, self.inputs, first, data)
        return out

    def product(self, x: torch.Tensor, cap: float = 0.0) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``; ``cap`` as of soft-capped logits."""
        rows = x.to(self.dtype).reshape(-1, self.inputs).contiguous()
        out = torch.empty(rows.shape[0], self.outputs, dtype=self.dtype)
        check(
            library().pl_product(
                DTYPES[self.dtype],
                self.struct(),
                rows.data_ptr(),
                rows.shape[0],
                cap,
                out.data_ptr(),
                torch.get_num_threads(),
            )
        )
        return out.view(*x.shape[:-1], self.outputs)


def _lanes(place: int, first: int, count: int) -> torch.Tensor:
    """Packed outputs of the outputs ``first ..`` of a matrix."""
    outputs = torch.arange(first, first + count)
    if place == PLAIN:
        return outputs
    return outputs // 16 * _PANEL + outputs % 16 + (16 if place == UP else 0)


class PackedLinear(nn.Module):
    """Stands for an ``nn.Linear`` whose weight is part of a packed one, its only copy."""

    def __init__(self, linear: nn.Linear, packed: Packed, place: int, first: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed, self.place, self.first = packed, place, first

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy, exactly the weight that was packed; costs memory and time."""
        return self.packed.dense(self.place, self.first, self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == PLAIN and self.out_features == self.packed.outputs:
            return self.packed.product(x)
        return F.linear(x, self.weight, self.bias)

    def plain(self) -> nn.Linear:
        """The module that this one stands for, made again."""
        linear = nn.Linear(1, 1, bias=False)
        linear.in_features, linear.out_features = self.in_features, self.out_features
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias, requires_grad=False)
        return linear


def pack_children(parent: nn.Module, names: Sequence[str], gated: bool = False) -> Packed:
    """Pack the linear children of these names into one, and replace them."""
    linears = [getattr(parent, name) for name in names]
    packed = Packed.of(linears, gated)
    first = 0
    for name, linear, place in zip(
        names, linears, (GATE, UP) if gated else (PLAIN,) * 3, strict=False
    ):
        setattr(parent, name, PackedLinear(linear, packed, place, 0 if gated else first))
        first += linear.out_features
    return packed

"""Weights in the layout of the kernels, and the modules that replace the plain ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.memory import trim
from paceline.kernels.library import (
    DTYPES,
    GATE,
    OFFSETS_LEAST,
    OFFSETS_MIDDLE,
    OFFSETS_NONE,
    PLAIN,
    SCALE_BFLOAT16,
    SCALE_FLOAT,
    SCALE_HALF,
    UP,
    CNorm,
    CWeight,
    check,
    library,
    pointer,
)
from paceline.kernels.pages import zeros
from paceline.model.backends.counters import NativeWork, WeightRead, count_work
from paceline.model.quantised.convert import Experts
from paceline.model.quantised.weights import (
    ROW_GROUP,
    LinearBase,
    MatrixSize,
    QuantisedLinear,
    QuantisedWeight,
    common_form,
    plain_linear,
)

_PANEL = 32
_TRIM_BYTES = 64 << 20
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
AnyLinear = nn.Linear | LinearBase


@dataclass(frozen=True)
class Packed:
    """Matrices with the same input in the kernels' layout (csrc/gemm.h, csrc/quantised.h)."""

    data: torch.Tensor  # bytes
    bias: torch.Tensor | None  # float32, one for each packed output
    outputs: int  # a gated pair's are counted once
    inputs: int
    dtype: torch.dtype  # of activations and of plain weights
    form: Form | None = None  # of quantised weights
    elements: int = 0  # of the matrices, padding left out

    @classmethod
    def of(cls, linears: Sequence[AnyLinear], dtype: torch.dtype, gated: bool = False) -> Packed:
        """The matrices one below the other; ``gated``: two, their outputs interleaved."""
        quantised = [linear for linear in linears if isinstance(linear, QuantisedLinear)]
        weights = common_form([linear.quantised for linear in quantised])
        packed = cls.blank(linears, dtype, gated, Form.of(weights))
        for index, (linear, part, first) in enumerate(_members(linears, gated)):
            if weights:  # all are quantised: see same_form
                packed._copy_quantised(weights[index], part, first, out=0)
            else:
                weight, kind = linear.weight.detach().contiguous(), DTYPES[dtype]
                shape, data = (linear.out_features, packed.inputs), packed.data.data_ptr()
                library().pl_pack(kind, part, weight.data_ptr(), *shape, first, data)
        return packed

    @classmethod
    def blank(
        cls, linears: Sequence[AnyLinear], dtype: torch.dtype, gated: bool, form: Form | None
    ) -> Packed:
        """A matrix of that form and size, all zeros, with the layers' biases."""
        inputs = linears[0].in_features
        rows = sum(linear.out_features for linear in linears)
        padded = 2 * -(-rows // 2 // 16) * 16 if gated else -(-rows // _PANEL) * _PANEL
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.zeros(padded)
            for linear, part, first in _members(linears, gated):
                if linear.bias is not None:
                    outputs = _packed_outputs(part, first, linear.out_features)
                    bias[outputs] = linear.bias.detach().float()
        if form is None:
            size = library().pl_packed_bytes(DTYPES[dtype], padded, inputs)
        else:
            size = library().pl_quantised_bytes(CWeight(None, None, padded, inputs, *form))
        return cls(zeros(size), bias, rows // (1 + gated), inputs, dtype, form, rows * inputs)

    def _copy_quantised(self, weight: QuantisedWeight, part: int, first: int, out: int) -> None:
        numbers = pointer(weight.codes), pointer(weight.scales), pointer(weight.offsets)
        rows = weight.shape[0]
        library().pl_copy_quantised(out, part, *numbers, rows, first, self.struct())

    def read(self, rows: int) -> WeightRead:
        return WeightRead(self.data.data_ptr(), self.elements, self.data.numel(), rows)

    def struct(self) -> Any:
        pointers = pointer(self.data), pointer(self.bias)
        return CWeight(*pointers, self.outputs, self.inputs, *(self.form or ()))

    def quantised(self, part: int, first: int, rows: int) -> QuantisedWeight:
        """A copy of ``rows`` outputs of quantised weights from ``first`` on."""
        assert self.form is not None
        groups = self.form.groups(self.inputs)
        weight = QuantisedWeight(
            torch.empty(rows, self.inputs, dtype=torch.int8),
            torch.empty(rows, groups),
            self.form.bits,
            torch.empty(rows, groups) if self.form.offsets else None,
            self.form.offsets == OFFSETS_LEAST,
            not self.form.wide,
        )
        self._copy_quantised(weight, part, first, out=1)
        return weight

    def dense(self, part: int, first: int, rows: int) -> torch.Tensor:
        """A copy of ``rows`` outputs from ``first`` on, with the numbers that were packed."""
        if self.form is not None:
            return self.quantised(part, first, rows).dense(self.dtype)
        out = torch.empty(rows, self.inputs, dtype=self.dtype)
        code, data = DTYPES[self.dtype], self.data.data_ptr()
        library().pl_unpack(code, part, out.data_ptr(), rows, self.inputs, first, data)
        return out

    def product(self, x: torch.Tensor, cap: float = 0.0) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``; ``cap``: soft cap of logits, 0 for none."""
        rows = x.to(self.dtype).reshape(-1, self.inputs).contiguous()
        count, threads = len(rows), torch.get_num_threads()
        out = torch.empty(count, self.outputs, dtype=self.dtype)
        inputs = DTYPES[self.dtype], self.struct(), rows.data_ptr(), count
        check(library().pl_product(*inputs, cap, 1, 0, out.data_ptr(), threads))
        count_work(lambda: [NativeWork((self.read(count),))])
        return out.view(*x.shape[:-1], self.outputs)


class Form(NamedTuple):
    """How quantised weights are packed, as in CWeight. ``repeat``: groups of 32 inputs that share a
    scale, 0 if each has two; ``offsets``: OFFSETS_NONE or the code that they belong to."""

    bits: int
    repeat: int
    scale_kind: int
    offsets: int
    wide: bool

    def groups(self, inputs: int) -> int:
        return inputs // ROW_GROUP // self.repeat if self.repeat else 2 * inputs // ROW_GROUP

    @classmethod
    def of(cls, weights: Sequence[QuantisedWeight]) -> Form | None:
        """The form that holds all of these exactly; None if there are none."""
        if not weights:
            return None
        first, kind = weights[0], SCALE_FLOAT
        numbers = [n for w in weights for n in (w.scales, w.offsets) if n is not None]
        for code, dtype in ((SCALE_HALF, torch.half), (SCALE_BFLOAT16, torch.bfloat16)):
            if all(torch.equal(values.to(dtype).float(), values) for values in numbers):
                kind = code
        offsets = OFFSETS_NONE
        if first.offsets is not None:
            offsets = OFFSETS_LEAST if first.from_zero else OFFSETS_MIDDLE
        return cls(first.bits, first.group // ROW_GROUP, kind, offsets, first.wide)


def same_form(linears: Sequence[nn.Module]) -> bool:
    """Whether these can be packed into one matrix: all or none are quantised."""
    return sum(isinstance(linear, QuantisedLinear) for linear in linears) in (0, len(linears))


def _members(linears: Sequence[Any], gated: bool) -> Iterator[tuple[Any, int, int]]:
    """The layers of a packed matrix, with the part and the first output of each."""
    first = 0
    parts = (GATE, UP) if gated else (PLAIN,) * len(linears)
    for linear, part in zip(linears, parts, strict=True):
        yield linear, part, 0 if gated else first
        first += linear.out_features


def _packed_outputs(part: int, first: int, count: int) -> torch.Tensor:
    """Where the outputs ``first ..`` of a matrix are in the packed one."""
    outputs = torch.arange(first, first + count)
    if part == PLAIN:
        return outputs
    return outputs // 16 * _PANEL + outputs % 16 + (16 if part == UP else 0)


class PackedLinear(LinearBase):
    """An ``nn.Linear`` whose weight is part of a packed matrix, its only copy."""

    def __init__(self, linear: AnyLinear, packed: Packed, part: int, first: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed, self.part, self.first = packed, part, first

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy ``[out, in]`` of what was packed; costs memory and time."""
        return self.packed.dense(self.part, self.first, self.out_features)

    def matrix_size(self) -> MatrixSize:
        elements = self.in_features * self.out_features
        packed, form = self.packed, self.packed.form
        size = packed.data.nbytes * elements // max(1, packed.elements)
        return MatrixSize(8 * packed.dtype.itemsize if form is None else form.bits, elements, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part == PLAIN and self.out_features == self.packed.outputs:
            return self.packed.product(x)
        return F.linear(x, self.weight, self.bias)

    def plain(self) -> nn.Linear | QuantisedLinear:
        """The module that this one replaces, made again."""
        if self.packed.form is not None:
            weight = self.packed.quantised(self.part, self.first, self.out_features)
            return QuantisedLinear(weight, self.bias)
        return plain_linear(self.weight, self.bias)


def pack_children(
    parent: nn.Module, names: Sequence[str], dtype: torch.dtype, gated: bool = False
) -> Packed:
    """Pack the linear children of these names into one matrix, if they are not packed yet."""
    linears = [getattr(parent, name) for name in names]
    if isinstance(linears[0], PackedLinear):
        return linears[0].packed
    packed = Packed.of(linears, dtype, gated)
    for name, (linear, part, first) in zip(names, _members(linears, gated), strict=True):
        setattr(parent, name, PackedLinear(linear, packed, part, first))
    return packed


class Packing:
    """Packed weights and norms that an opened model points to; they live as long as it."""

    def __init__(self) -> None:
        self.alive: list[Any] = []
        self._untrimmed = 0  # bytes packed since the last trim
        # With the share of the rows that read the matrix (None: rows with logits), and its layer.
        self.packed: list[tuple[Packed, float | None, int | None]] = []

    def weight(self, packed: Packed, part: float | None = 1.0, layer: int | None = None) -> Any:
        self.packed.append((packed, part, layer))
        # Without this a whole model would be in memory twice.
        self._untrimmed += packed.data.nbytes
        if self._untrimmed > _TRIM_BYTES:
            trim()
            self._untrimmed = 0
        return packed.struct()

    def matrices(self, layer: Any, dtype: torch.dtype, number: int | None = None) -> dict[str, Any]:
        """Fields of CLayer: the matrices of a decoder layer, packed in place."""
        attention, mlp, weight = layer.self_attn, layer.mlp, partial(self.weight, layer=number)
        fields: dict[str, Any] = {
            "qkv": weight(pack_children(attention, PROJECTIONS, dtype)),
            "out": weight(pack_children(attention, ("o_proj",), dtype)),
        }
        if not hasattr(mlp, "experts"):
            fields["gate_up"] = weight(pack_children(mlp, GATED, dtype, gated=True))
            fields["down"] = weight(pack_children(mlp, ("down_proj",), dtype))
            return fields
        if not isinstance(mlp.experts, Experts):
            mlp.experts = Experts(mlp.experts)
        experts = mlp.experts
        chosen, count = mlp.gate.top_k, len(experts)
        share, structs = chosen / count, CWeight * count
        gate_up = structs(*(weight(pack_children(e, GATED, dtype, True), share) for e in experts))
        down = structs(*(weight(pack_children(e, ("down_proj",), dtype), share) for e in experts))
        self.alive += (gate_up, down)
        router = weight(Packed.of([plain_linear(mlp.gate.weight)], dtype))
        fields |= {"experts": count, "chosen": chosen, "router": router}
        return fields | {"expert_gate_up": gate_up, "expert_down": down}

    def norm(self, norm: Any) -> Any:
        """``norm`` has ``weight`` and ``eps``; None is no norm."""
        if norm is None:
            return CNorm(None, 0.0)
        weight = norm.weight.detach().float().contiguous()
        self.alive.append(weight)
        return CNorm(weight.data_ptr(), norm.eps)

    def reads(self, rows: int, wanted: int, skipped: Any) -> tuple[WeightRead, ...]:
        """Matrices that a forward over ``rows`` reads, ``wanted`` of which have logits."""
        return tuple(
            matrix.read(wanted if part is None else round(rows * part))
            for matrix, part, layer in self.packed
            if not (skipped and layer is not None and skipped[layer])
        )

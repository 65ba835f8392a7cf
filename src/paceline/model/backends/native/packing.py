"""Weight matrices in the kernels' layout, and the linear modules that read them from there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from paceline.core.memory import trim
from paceline.kernels.library import (
    DTYPES,
    GATE,
    OFFSETS_NONE,
    OFFSETS_SIGNED,
    OFFSETS_UNSIGNED,
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
from paceline.model.backends.native.split import linear_of, owner
from paceline.model.quantised.weights import (
    ROW_GROUP,
    LinearBase,
    MatrixSize,
    QuantisedLinear,
    QuantisedWeight,
    in_common_format,
    plain_linear,
)

_PACK, _UNPACK = 0, 1  # directions of pl_copy_dense
_PANEL = 32  # outputs that are interleaved
_TRIM_BYTES = 64 << 20  # packed bytes after which freed memory is given back to the system
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
AnyLinear = nn.Linear | LinearBase


@dataclass(frozen=True)
class PackedMatrix:
    """Matrices with the same input, in the kernels' layout (csrc/gemm.h, csrc/quantised.h)."""

    data: torch.Tensor  # bytes
    bias: torch.Tensor | None  # float32, one for each packed output
    outputs: int  # outputs of a gated pair are counted once
    inputs: int
    dtype: torch.dtype  # of activations and of unquantised weights
    form: PackedFormat | None = None  # None: the weights are not quantised
    elements: int = 0  # weights without padding

    @classmethod
    def pack(
        cls, linears: Sequence[AnyLinear], dtype: torch.dtype, gated: bool = False
    ) -> PackedMatrix:
        """Pack the weights of ``linears`` one below the other. ``gated``: there are two, gate and
        up projection, and their outputs are interleaved. All or none may be quantised."""
        quantised = [linear for linear in linears if isinstance(linear, QuantisedLinear)]
        weights = in_common_format([linear.quantised for linear in quantised])
        packed = cls.empty(linears, dtype, gated, PackedFormat.of(weights))
        for index, (linear, part, first) in enumerate(_placements(linears, gated)):
            if weights:
                packed._copy_quantised(weights[index], part, first, out=0)
            else:
                weight, kind = linear.weight.detach().contiguous(), DTYPES[dtype]
                shape, data = (linear.out_features, packed.inputs), packed.data.data_ptr()
                library().pl_copy_dense(_PACK, kind, part, weight.data_ptr(), *shape, first, data)
        return packed

    @classmethod
    def empty(
        cls,
        linears: Sequence[AnyLinear],
        dtype: torch.dtype,
        gated: bool,
        form: PackedFormat | None,
    ) -> PackedMatrix:
        """A matrix of zeros with the size and the biases of ``linears``, in format ``form``."""
        inputs = linears[0].in_features
        rows = sum(linear.out_features for linear in linears)
        padded = 2 * -(-rows // 2 // 16) * 16 if gated else -(-rows // _PANEL) * _PANEL
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.zeros(padded)
            for linear, part, first in _placements(linears, gated):
                if linear.bias is not None:
                    outputs = _packed_outputs(part, first, linear.out_features)
                    bias[outputs] = linear.bias.detach().float()
        if form is None:
            size = library().pl_packed_bytes(DTYPES[dtype], padded, inputs)
        else:
            size = library().pl_quantised_bytes(CWeight(None, None, padded, inputs, *form))
        return cls(zeros(size), bias, rows // (1 + gated), inputs, dtype, form, rows * inputs)

    def _copy_quantised(self, weight: QuantisedWeight, part: int, first: int, out: int) -> None:
        """Copy ``weight`` into the packed matrix, from output ``first`` on; ``out`` 1: copy from
        the packed matrix into ``weight``."""
        numbers = pointer(weight.codes), pointer(weight.scales), pointer(weight.offsets)
        rows = weight.shape[0]
        library().pl_copy_quantised(out, part, *numbers, rows, first, self.struct())

    def struct(self) -> Any:
        """The CWeight; its pointers are valid while this matrix lives."""
        pointers = pointer(self.data), pointer(self.bias)
        return CWeight(*pointers, self.outputs, self.inputs, *(self.form or ()))

    def quantised(self, part: int, first: int, rows: int) -> QuantisedWeight:
        """A copy of ``rows`` quantised outputs, starting at output ``first`` of ``part``."""
        assert self.form is not None
        groups = self.form.groups(self.inputs)
        weight = QuantisedWeight(
            torch.empty(rows, self.inputs, dtype=torch.int8),
            torch.empty(rows, groups),
            self.form.bits,
            torch.empty(rows, groups) if self.form.offset_kind else None,
            self.form.offset_kind == OFFSETS_UNSIGNED,
            not self.form.int16_activations,
            self.form.e2m1,
        )
        self._copy_quantised(weight, part, first, out=1)
        return weight

    def dense(self, part: int, first: int, rows: int) -> torch.Tensor:
        """A dense copy of ``rows`` outputs, starting at output ``first`` of ``part``."""
        if self.form is not None:
            return self.quantised(part, first, rows).dense(self.dtype)
        out = torch.empty(rows, self.inputs, dtype=self.dtype)
        code, data = DTYPES[self.dtype], self.data.data_ptr()
        library().pl_copy_dense(_UNPACK, code, part, out.data_ptr(), rows, self.inputs, first, data)
        return out

    def multiply(self, x: torch.Tensor, cap: float = 0.0) -> torch.Tensor:
        """``[..., outputs]`` of ``x [..., inputs]``, with bias; ``cap``: soft cap, 0 for none."""
        rows = x.to(self.dtype).reshape(-1, self.inputs).contiguous()
        count, threads = len(rows), torch.get_num_threads()
        out = torch.empty(count, self.outputs, dtype=self.dtype)
        inputs = DTYPES[self.dtype], self.struct(), rows.data_ptr(), count
        check(library().pl_product(*inputs, cap, 1, 0, out.data_ptr(), threads))
        return out.view(*x.shape[:-1], self.outputs)


class PackedFormat(NamedTuple):
    """How quantised weights are packed; the fields are those of CWeight. ``groups_per_scale``: how
    many groups of 32 inputs share a scale; 0: every 16 inputs have their own. ``offset_kind``:
    OFFSETS_NONE, or how codes with offsets are stored. ``e2m1``: codes are 4-bit floats."""

    bits: int
    groups_per_scale: int
    scale_kind: int
    offset_kind: int
    int16_activations: bool
    e2m1: bool = False

    def groups(self, inputs: int) -> int:
        groups = inputs // ROW_GROUP
        return groups // self.groups_per_scale if self.groups_per_scale else 2 * groups

    @classmethod
    def of(cls, weights: Sequence[QuantisedWeight]) -> PackedFormat | None:
        """The format that stores all ``weights`` without loss; None if there are no weights."""
        if not weights:
            return None
        first, kind = weights[0], SCALE_FLOAT
        numbers = [n for w in weights for n in (w.scales, w.offsets) if n is not None]
        for code, dtype in ((SCALE_HALF, torch.half), (SCALE_BFLOAT16, torch.bfloat16)):
            if all(torch.equal(values.to(dtype).float(), values) for values in numbers):
                kind = code
        offset_kind = OFFSETS_NONE
        if first.offsets is not None:
            offset_kind = OFFSETS_UNSIGNED if first.unsigned else OFFSETS_SIGNED
        group, wide = first.group // ROW_GROUP, first.int16_activations
        return cls(first.bits, group, kind, offset_kind, wide, first.e2m1)


def all_or_none_quantised(linears: Sequence[nn.Module]) -> bool:
    """Whether these linear layers can be packed into one matrix."""
    return sum(isinstance(linear, QuantisedLinear) for linear in linears) in (0, len(linears))


def _placements(linears: Sequence[Any], gated: bool) -> Iterator[tuple[Any, int, int]]:
    """Where each layer goes in the packed matrix: (layer, PLAIN or GATE or UP, first output)."""
    first = 0
    parts = (GATE, UP) if gated else (PLAIN,) * len(linears)
    for linear, part in zip(linears, parts, strict=True):
        yield linear, part, 0 if gated else first
        first += linear.out_features


def _packed_outputs(part: int, first: int, count: int) -> torch.Tensor:
    """Indices in the packed matrix of ``count`` outputs of a part, from ``first`` on."""
    outputs = torch.arange(first, first + count)
    if part == PLAIN:
        return outputs
    return outputs // 16 * _PANEL + outputs % 16 + (16 if part == UP else 0)


class PackedLinear(LinearBase):
    """Replaces an ``nn.Linear``; the only copy of its weight is in the packed matrix."""

    def __init__(self, linear: AnyLinear, packed: PackedMatrix, part: int, first: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed, self.part, self.first = packed, part, first

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy ``[out, in]``; every access allocates and unpacks it."""
        return self.packed.dense(self.part, self.first, self.out_features)

    def matrix_size(self) -> MatrixSize:
        elements = self.in_features * self.out_features
        packed, form = self.packed, self.packed.form
        size = packed.data.nbytes * elements // max(1, packed.elements)
        return MatrixSize(8 * packed.dtype.itemsize if form is None else form.bits, elements, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part == PLAIN and self.out_features == self.packed.outputs:
            return self.packed.multiply(x)
        return F.linear(x, self.weight, self.bias)


def pack_children(
    parent: nn.Module, names: Sequence[str], dtype: torch.dtype, gated: bool = False
) -> PackedMatrix:
    """Pack the linear children ``names`` of ``parent`` into one matrix, and replace each by a
    ``PackedLinear``. Children that are packed already stay as they are."""
    linears = [linear_of(parent, name) for name in names]
    if isinstance(linears[0], PackedLinear):
        return linears[0].packed
    packed = PackedMatrix.pack(linears, dtype, gated)
    for name, (linear, part, first) in zip(names, _placements(linears, gated), strict=True):
        setattr(owner(parent, name), name, PackedLinear(linear, packed, part, first))
    return packed


class WeightPacker:
    """Packs the weights and norms of a model, and owns what the opened model points to."""

    def __init__(self) -> None:
        self.keep_alive: list[Any] = []
        self._untrimmed = 0  # bytes packed since the last trim
        self.matrices: list[PackedMatrix] = []

    def add(self, packed: PackedMatrix) -> Any:
        """Own a packed matrix; returns its CWeight."""
        self.matrices.append(packed)
        # Without trimming, the freed originals would stay resident: a whole model twice in memory.
        self._untrimmed += packed.data.nbytes
        if self._untrimmed > _TRIM_BYTES:
            trim()
            self._untrimmed = 0
        return packed.struct()

    def pack_layer(self, layer: Any, dtype: torch.dtype) -> dict[str, Any]:
        """Pack the matrices of a decoder layer in place; returns them as fields of CLayer."""
        attention, mlp, add = layer.self_attn, layer.mlp, self.add
        fields: dict[str, Any] = {
            "qkv": add(pack_children(attention, PROJECTIONS, dtype)),
            "out": add(pack_children(attention, ("o_proj",), dtype)),
        }
        if not hasattr(mlp, "experts"):
            fields["gate_up"] = add(pack_children(mlp, GATED, dtype, gated=True))
            fields["down"] = add(pack_children(mlp, ("down_proj",), dtype))
            return fields
        experts, gate = mlp.experts, mlp.router if hasattr(mlp, "router") else mlp.gate
        chosen, count = gate.top_k, len(experts)
        array_of = CWeight * count
        gate_up = array_of(*(add(pack_children(e, GATED, dtype, True)) for e in experts))
        down = array_of(*(add(pack_children(e, ("down_proj",), dtype)) for e in experts))
        self.keep_alive += (gate_up, down)
        linear = plain_linear(gate.weight, getattr(gate, "bias", None))
        router = add(PackedMatrix.pack([linear], dtype))
        fields |= {"experts": count, "experts_per_row": chosen, "router": router}
        return fields | {"expert_gate_up": gate_up, "expert_down": down}

    def norm(self, norm: Any) -> Any:
        """The CNorm of an object with ``weight`` and ``eps``; None: there is no norm."""
        return CNorm(None, 0.0) if norm is None else CNorm(self.numbers(norm.weight), norm.eps)

    def numbers(self, tensor: torch.Tensor | None) -> int | None:
        """The address of a tensor's numbers in float32; None without a tensor."""
        if tensor is None:
            return None
        self.keep_alive.append(tensor.detach().float().contiguous())
        return pointer(self.keep_alive[-1])

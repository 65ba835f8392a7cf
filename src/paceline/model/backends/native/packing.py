"""Weights in the layout of the kernels, and the modules that stand in for the plain ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
)
from paceline.kernels.pages import zeros
from paceline.model.backends.counters import NativeWork, WeightRead, count_work
from paceline.model.quantised.weights import (
    ROW_GROUP,
    HeldLinear,
    HeldMatrix,
    QuantisedLinear,
    QuantisedWeight,
    alike,
    plain_linear,
)

_PANEL = 32
_TRIM_BYTES = 64 << 20
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Packed:
    """One or more matrices of the same input as the kernels read them (csrc/products.h; quantised
    ones: csrc/quantised.cpp)."""

    data: torch.Tensor  # bytes
    bias: torch.Tensor | None  # float32, one for each packed output
    outputs: int  # as packed: the two of a gated pair count once
    inputs: int
    dtype: torch.dtype  # of activations, and of weights that are plain numbers
    form: Form | None = None  # of quantised weights
    elements: int = 0  # of the matrices, padding left out

    @classmethod
    def of(
        cls, linears: Sequence[nn.Linear | QuantisedLinear], dtype: torch.dtype, gated: bool = False
    ) -> Packed:
        """The matrices one below the other; ``gated``: two, their outputs side by side."""
        quantised = [linear for linear in linears if isinstance(linear, QuantisedLinear)]
        weights = alike([linear.quantised for linear in quantised])
        if quantised:  # all are: see same_form
            linears = [
                QuantisedLinear(w, old.bias) for w, old in zip(weights, quantised, strict=True)
            ]
        packed = cls.blank(linears, dtype, gated, Form.of(weights))
        at = 0
        for part, linear in zip(_parts_of(gated), linears, strict=False):
            packed._take(linear, part, 0 if gated else at)
            at += linear.out_features
        return packed

    @classmethod
    def blank(
        cls,
        linears: Sequence[nn.Linear | QuantisedLinear | PackedLinear],
        dtype: torch.dtype,
        gated: bool,
        form: Form | None,
    ) -> Packed:
        """Room for such matrices, filled with zeros, and their biases."""
        inputs = linears[0].in_features
        rows = sum(linear.out_features for linear in linears)
        padded = 2 * -(-rows // 2 // 16) * 16 if gated else -(-rows // _PANEL) * _PANEL
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.zeros(padded)
            at = 0
            for part, linear in zip(_parts_of(gated), linears, strict=False):
                count = linear.out_features
                if linear.bias is not None:
                    lanes = _lanes(part, 0 if gated else at, count)
                    bias[lanes] = linear.bias.detach().float()
                at += count
        outputs = rows // 2 if gated else rows
        empty = cls(torch.empty(0), bias, padded, inputs, dtype, form).struct()
        if form is None:
            size = library().pl_packed_bytes(DTYPES[dtype], padded, inputs)
        else:
            size = library().pl_quantised_bytes(empty)
        return cls(zeros(size), bias, outputs, inputs, dtype, form, rows * inputs)

    def _take(self, linear: nn.Linear | QuantisedLinear, part: int, first: int) -> None:
        if isinstance(linear, QuantisedLinear):
            self._copy_quantised(linear.quantised, part, first, out=0)
            return
        weight = linear.weight.detach().contiguous()
        code, data = DTYPES[self.dtype], self.data.data_ptr()
        rows = linear.out_features
        library().pl_pack(code, part, weight.data_ptr(), rows, self.inputs, first, data)

    def _copy_quantised(self, weight: QuantisedWeight, part: int, first: int, out: int) -> None:
        offsets = None if weight.offsets is None else weight.offsets.data_ptr()
        library().pl_copy_quantised(
            out,
            part,
            weight.codes.data_ptr(),
            weight.scales.data_ptr(),
            offsets,
            weight.shape[0],
            first,
            self.struct(),
        )

    def read(self, rows: int) -> WeightRead:
        """What a product of ``rows`` rows with all of it reads."""
        return WeightRead(self.data.data_ptr(), self.elements, self.data.numel(), rows)

    def struct(self) -> CWeight:
        bias = None if self.bias is None else self.bias.data_ptr()
        plain = CWeight(self.data.data_ptr(), bias, self.outputs, self.inputs)
        if self.form is not None:
            plain.bits, plain.repeat = self.form.bits, self.form.repeat
            plain.scale_kind, plain.offsets = self.form.scale_kind, self.form.offsets
            plain.wide = self.form.wide
        return plain

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
        """A copy of ``rows`` outputs from ``first`` on, exactly what was packed."""
        if self.form is not None:
            return self.quantised(part, first, rows).dense(self.dtype)
        out = torch.empty(rows, self.inputs, dtype=self.dtype)
        code, data = DTYPES[self.dtype], self.data.data_ptr()
        library().pl_unpack(code, part, out.data_ptr(), rows, self.inputs, first, data)
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
        count_work(lambda: NativeWork((self.read(rows.shape[0]),)))
        return out.view(*x.shape[:-1], self.outputs)


@dataclass(frozen=True)
class Form:
    """How quantised weights are packed. ``repeat``: groups of 32 inputs that share a scale, 0 if
    each has two; ``offsets``: whether there are any, and to which code they belong; ``wide``: as of
    a QuantisedWeight."""

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
    """Whether these can be packed into one matrix: all are quantised, or none."""
    return sum(isinstance(linear, QuantisedLinear) for linear in linears) in (0, len(linears))


def _parts_of(gated: bool) -> tuple[int, ...]:
    return (GATE, UP) if gated else (PLAIN,) * 3


def _lanes(part: int, first: int, count: int) -> torch.Tensor:
    """Packed outputs of the outputs ``first ..`` of a matrix."""
    outputs = torch.arange(first, first + count)
    if part == PLAIN:
        return outputs
    return outputs // 16 * _PANEL + outputs % 16 + (16 if part == UP else 0)


class PackedLinear(HeldLinear):
    """Stands for an ``nn.Linear`` whose weight is part of a packed one, its only copy."""

    def __init__(
        self,
        linear: nn.Linear | QuantisedLinear | PackedLinear,
        packed: Packed,
        part: int,
        first: int,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed, self.part, self.first = packed, part, first

    @property
    def weight(self) -> torch.Tensor:
        """A dense copy, exactly the weight that was packed; costs memory and time."""
        return self.packed.dense(self.part, self.first, self.out_features)

    def held(self) -> HeldMatrix:
        elements = self.in_features * self.out_features
        packed, form = self.packed, self.packed.form
        size = packed.data.nbytes * elements // max(1, packed.elements)
        return HeldMatrix(8 * packed.dtype.itemsize if form is None else form.bits, elements, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part == PLAIN and self.out_features == self.packed.outputs:
            return self.packed.product(x)
        return F.linear(x, self.weight, self.bias)

    def plain(self) -> nn.Linear | QuantisedLinear:
        """The module that this one stands for, made again."""
        if self.packed.form is not None:
            weight = self.packed.quantised(self.part, self.first, self.out_features)
            return QuantisedLinear(weight, self.bias)
        return plain_linear(self.weight, self.bias)


class PackedExperts(nn.Module):
    """Stands for the experts of a layer, whose weights are packed, expert by expert."""

    _emptied: Any

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        """Takes the weights out of the module it stands for."""
        super().__init__()
        self.__dict__["_emptied"] = experts  # no submodule: it holds nothing
        self.gate_up: list[Packed] = []
        self.down: list[Packed] = []
        for both, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
            parts = [plain_linear(part) for part in both.chunk(2)]
            self.gate_up.append(Packed.of(parts, dtype, True))
            self.down.append(Packed.of([plain_linear(down)], dtype))
        experts.gate_up_proj = experts.down_proj = None

    def plain(self) -> nn.Module:
        """The module that this one stands for, with its weights."""
        ffn, hidden = self.gate_up[0].outputs, self.gate_up[0].inputs
        gate_up = [[p.dense(part, 0, ffn) for part in (GATE, UP)] for p in self.gate_up]
        module = copy.copy(self._emptied)
        weights = {
            "gate_up_proj": torch.stack([torch.cat(both) for both in gate_up]),
            "down_proj": torch.stack([p.dense(PLAIN, 0, hidden) for p in self.down]),
        }
        module._parameters = {
            name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()
        }
        return module  # type: ignore[no-any-return]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain()(*args, **kwargs)


def pack_children(
    parent: nn.Module, names: Sequence[str], dtype: torch.dtype, gated: bool = False
) -> Packed:
    """Pack the linear children of these names into one, and replace them; those that are packed
    already stay."""
    linears = [getattr(parent, name) for name in names]
    if isinstance(linears[0], PackedLinear):
        return linears[0].packed
    packed = Packed.of(linears, dtype, gated)
    first = 0
    for name, linear, part in zip(names, linears, _parts_of(gated), strict=False):
        setattr(parent, name, PackedLinear(linear, packed, part, 0 if gated else first))
        first += linear.out_features
    return packed


class Packing:
    """What an opened model points to: packed weights and norms, held for as long as it is."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._untrimmed = 0  # bytes packed since memory was last given back
        # With the part of the rows that they see, None of those with logits, and their layer.
        self.packed: list[tuple[Packed, float | None, int | None]] = []

    def weight(self, packed: Packed, part: float | None = 1.0, layer: int | None = None) -> CWeight:
        self.packed.append((packed, part, layer))
        # What was packed is free now: without this all of a model would lie in memory twice.
        self._untrimmed += packed.data.nbytes
        if self._untrimmed > _TRIM_BYTES:
            self.trim()
        return packed.struct()

    def trim(self) -> None:
        """Give the memory of what was packed back to the system."""
        trim()
        self._untrimmed = 0

    def matrices(self, layer: Any, dtype: torch.dtype, number: int | None = None) -> dict[str, Any]:
        """Those of a decoder layer, packed; its modules keep no others."""
        attention, mlp, weight = layer.self_attn, layer.mlp, partial(self.weight, layer=number)
        fields: dict[str, Any] = {
            "qkv": weight(pack_children(attention, PROJECTIONS, dtype)),
            "out": weight(pack_children(attention, ("o_proj",), dtype)),
        }
        if not hasattr(mlp, "experts"):
            fields["gate_up"] = weight(pack_children(mlp, GATED, dtype, gated=True))
            fields["down"] = weight(pack_children(mlp, ("down_proj",), dtype))
            return fields
        if not isinstance(mlp.experts, PackedExperts):
            mlp.experts = PackedExperts(mlp.experts, dtype)
        chosen, count = mlp.gate.top_k, len(mlp.experts.down)
        gate_up, down = (
            (CWeight * count)(*(weight(one, chosen / count) for one in experts))
            for experts in (mlp.experts.gate_up, mlp.experts.down)
        )
        self.keep(gate_up, down)
        router = weight(Packed.of([plain_linear(mlp.gate.weight)], dtype))
        fields |= {"experts": count, "chosen": chosen, "router": router}
        return fields | {"expert_gate_up": gate_up, "expert_down": down}

    def norm(self, norm: Any) -> CNorm:
        """Of what has ``weight`` and ``eps``, or None."""
        if norm is None:
            return CNorm(None, 0.0)
        weight = norm.weight.detach().float().contiguous()
        self.keep(weight)
        return CNorm(weight.data_ptr(), norm.eps)

    def keep(self, *what: Any) -> None:
        self._held += what

    def reads(self, rows: int, wanted: int, skipped: Any) -> tuple[WeightRead, ...]:
        """What a forward over ``rows`` reads, ``wanted`` of which have logits; ``skipped``: a flag
        for each layer, if some are left out."""
        return tuple(
            matrix.read(wanted if part is None else round(rows * part))
            for matrix, part, layer in self.packed
            if not (skipped and layer is not None and skipped[layer])
        )

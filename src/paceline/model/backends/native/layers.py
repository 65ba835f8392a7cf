"""Weights and norms of decoder layers as the library reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from paceline.core.batch import Span
from paceline.core.memory import trim
from paceline.kernels.library import CNorm, CWeight
from paceline.model.backends.counters import NativeWork
from paceline.model.backends.native.llama import RMSNorm
from paceline.model.backends.native.packing import (
    Packed,
    PackedExperts,
    pack_children,
)
from paceline.model.backends.native.recognise import GATED, PROJECTIONS
from paceline.model.paged.segments import KeyValueStore
from paceline.model.quantised.weights import plain_linear

_TRIM_BYTES = 64 << 20


class Packing:
    """Weights and norms as the library reads them, kept for as long as it may."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._untrimmed = 0  # bytes packed since memory was last given back
        # With the part of the rows that they see, and the layer that they are of.
        self.packed: list[tuple[Packed, float, int | None]] = []

    def weight(self, packed: Packed, part: float = 1.0, layer: int | None = None) -> CWeight:
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
        attended = {
            "qkv": weight(pack_children(attention, PROJECTIONS, dtype)),
            "out": weight(pack_children(attention, ("o_proj",), dtype)),
        }
        if hasattr(mlp, "experts"):
            return attended | self._experts(mlp, dtype, number)
        return attended | {
            "gate_up": weight(pack_children(mlp, GATED, dtype, gated=True)),
            "down": weight(pack_children(mlp, ("down_proj",), dtype)),
        }

    def _experts(self, mlp: Any, dtype: torch.dtype, number: int | None) -> dict[str, Any]:
        if not isinstance(mlp.experts, PackedExperts):
            mlp.experts = PackedExperts(mlp.experts, dtype)
        packed = mlp.experts
        count = len(packed.down)
        gate_up, down = (
            (CWeight * count)(*(self.weight(one, mlp.gate.top_k / count, number) for one in every))
            for every in (packed.gate_up, packed.down)
        )
        self.keep(gate_up, down)
        return {
            "experts": count,
            "chosen": mlp.gate.top_k,
            "router": self.weight(Packed.of([plain_linear(mlp.gate.weight)], dtype), layer=number),
            "expert_gate_up": gate_up,
            "expert_down": down,
        }

    def norm(self, norm: RMSNorm | torch.nn.RMSNorm | None) -> CNorm:
        if norm is None:
            return CNorm(None, 0.0)
        weight = norm.weight.detach().float().contiguous()
        self._held.append(weight)
        return CNorm(weight.data_ptr(), norm.eps)

    def keep(self, *what: Any) -> None:
        self._held += what

    def work(
        self,
        spans: Sequence[Span],
        cache: KeyValueStore,
        wanted: int,
        head: Packed,
        width: int,
        layers: int,
        skipped: frozenset[int] = frozenset(),
    ) -> NativeWork:
        """Of a forward with ``wanted`` rows of logits and queries of ``width`` numbers, ``layers``
        of which are run and those ``skipped`` not. Of experts, as if the rows were shared out
        evenly."""
        rows = sum(span.rows for span in spans)
        reads = [
            matrix.read(wanted if matrix is head else round(rows * part))
            for matrix, part, layer in self.packed
            if layer not in skipped
        ]
        return NativeWork.of_forward(tuple(reads), spans, cache, layers, width)

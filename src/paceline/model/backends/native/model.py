"""A model whose forward is one call of the kernels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from paceline.core.batch import Batch, ModelOutput, Span
from paceline.core.memory import trim
from paceline.kernels.library import (
    DTYPES,
    CLayer,
    CModel,
    CNorm,
    CWeight,
    check,
    library,
)
from paceline.model.backends.base import NATIVE
from paceline.model.backends.counters import NativeWork, count_work, traced
from paceline.model.backends.native.adapter import BatchArrays, CachePointers, skipped_flags
from paceline.model.backends.native.growth import NativeGrowth
from paceline.model.backends.native.opened import Opened, Ropes
from paceline.model.backends.native.packing import (
    Packed,
    PackedExperts,
    PackedLinear,
    linear_of,
    pack_children,
)
from paceline.model.backends.native.recognise import GATED, PROJECTIONS, DecoderShape
from paceline.model.backends.reference.norms import RMSNorm
from paceline.model.paged.pieces import KeyValueStore

_TRIM_BYTES = 64 << 20
_PARTIAL_BYTES = 32 << 20  # of attention (csrc/forward.cpp)
_LEFT_OUT = torch.empty(0, 0)  # logits


class Packing:
    """Weights and norms as the library reads them, kept for as long as it may."""

    def __init__(self) -> None:
        self._held: list[Any] = []
        self._untrimmed = 0  # bytes packed since memory was last given back
        # With the part of the rows that they see, and the layer that they are of.
        self._matrices: list[tuple[Packed, float, int | None]] = []

    def weight(self, packed: Packed, part: float = 1.0, layer: int | None = None) -> CWeight:
        self._matrices.append((packed, part, layer))
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
        found = {
            "qkv": weight(pack_children(attention, PROJECTIONS, dtype)),
            "out": weight(pack_children(attention, ("o_proj",), dtype)),
        }
        if hasattr(mlp, "experts"):
            return found | self._experts(mlp, dtype, number)
        return found | {
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
            "router": self.weight(Packed.of([linear_of(mlp.gate.weight)], dtype), layer=number),
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
            for matrix, part, layer in self._matrices
            if layer not in skipped
        ]
        return NativeWork.of_forward(tuple(reads), spans, cache, layers, width)


class NativeModel:
    """A decoder's packed weights and the calls on them.

    ``skipped``: layers that are left out; the others keep their numbers, so their cache as well.
    """

    name = NATIVE

    def __init__(self, hf: Any, decoder: DecoderShape) -> None:
        """Packs the weights of ``hf`` layer by layer; its linear modules keep no others."""
        self.decoder, self.dtype = decoder, hf.dtype
        self.vocab_size, self.hidden_size = hf.model.embed_tokens.weight.shape
        self.num_layers = len(hf.model.layers)
        self.skipped: frozenset[int] = frozenset()
        self._flags: Any = None  # of what is skipped, for the library
        self._packing = Packing()
        layers = (CLayer * self.num_layers)(
            *(self._layer(layer, n) for n, layer in enumerate(hf.model.layers))
        )
        self.lm_head = pack_children(hf, ("lm_head",), self.dtype)
        self.embedding = hf.model.embed_tokens.weight.detach().contiguous()
        self._packing.keep(layers)
        self._opened = Opened(
            CModel(
                dtype=DTYPES[self.dtype],
                hidden=self.hidden_size,
                vocab=self.lm_head.outputs,
                words=self.vocab_size,
                layers=self.num_layers,
                heads=decoder.heads,
                kv_heads=decoder.kv_heads,
                head_dim=decoder.head_dim,
                ffn=decoder.ffn,
                activation=decoder.activation,
                embedding_scale=decoder.embedding_scale,
                scaling=decoder.scaling,
                attention_cap=decoder.attention_cap,
                logit_cap=decoder.logit_cap,
                embedding=self.embedding.data_ptr(),
                layer=layers,
                final_norm=self._packing.norm(decoder.final_norm),
                head=self._packing.weight(self.lm_head),
            )
        )
        self._packing.trim()
        self._ropes = Ropes(hf.model.rotary_emb, decoder.rope_kinds)
        self._caches = CachePointers(self.num_layers)

    def _layer(self, layer: Any, index: int) -> CLayer:
        norms, packing = self.decoder.norms[index], self._packing
        return CLayer(
            **packing.matrices(layer, self.dtype, index),
            attention_norm=packing.norm(norms.attention),
            mlp_norm=packing.norm(norms.mlp),
            attention_after=packing.norm(norms.attention_after),
            mlp_after=packing.norm(norms.mlp_after),
            q_norm=packing.norm(norms.q),
            k_norm=packing.norm(norms.k),
            window=self.decoder.windows[index],
            rope=self.decoder.ropes[index],
        )

    def without(self, skipped: frozenset[int]) -> NativeModel:
        """The same weights with some layers left out."""
        other = copy.copy(self)
        other.skipped, other._flags = skipped, skipped_flags(skipped, self.num_layers)
        return other

    @property
    def growth(self) -> NativeGrowth:
        """Grows drafts with this model, without the layers that are left out."""
        parts = self._opened, self._ropes, self._caches  # made anew: kept, it would keep the model
        return NativeGrowth(*parts, "grow", self._work, self._flags)

    @property
    def head_share(self) -> float:
        """Of the bytes of all matrices, the head's."""
        head = self.lm_head.data.nbytes
        return head / sum(matrix.data.nbytes for matrix, _, _ in self._packing._matrices)

    def scratch_bytes(self, rows: int) -> int:
        """As Backend: float32 activations, and partial results of attention."""
        shape = self.decoder
        width: int = 4 * self.hidden_size + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        return 4 * rows * (width + shape.ffn) + _PARTIAL_BYTES

    def _work(self, spans: Sequence[Span], cache: KeyValueStore, wanted: int) -> NativeWork:
        width, layers = self.decoder.heads * self.decoder.head_dim, self.num_layers
        run = layers - len(self.skipped)
        return self._packing.work(spans, cache, wanted, self.lm_head, width, run, self.skipped)

    def __call__(
        self,
        batch: Batch,
        cache: KeyValueStore,
        features: Sequence[int] = (),
        logits: bool = True,
    ) -> ModelOutput:
        """As CausalModel."""
        arrays = BatchArrays(batch, cache, self._caches.of(cache))
        wanted, kept, given = arrays.logit_rows, dict[int, torch.Tensor](), None
        if logits:
            given = torch.empty(wanted, self.lm_head.outputs, dtype=self.dtype)
        for layer in sorted(set(features)):
            kept[layer] = torch.empty(arrays.rows, self.hidden_size, dtype=self.dtype)
        arrays.give(given, kept, self._flags)
        greedy = arrays.choose()
        arrays.turn(self._ropes.reach(arrays.longest))
        with traced("forward"):
            check(library().pl_forward(self._opened.handle, arrays.struct))
        count_work(lambda: self._work(batch.spans, cache, wanted))
        found = {layer: kept[layer] for layer in features}
        return ModelOutput(_LEFT_OUT if given is None else given, found, greedy[:])

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of final-norm outputs ``[..., hidden]``."""
        return self.lm_head.product(hidden, self.decoder.logit_cap)


def unpack_modules(hf: Any) -> None:
    """Give a model whose weights were packed its plain ones back."""
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear | PackedExperts):
                setattr(parent, name, child.plain())

"""A model whose forward is one call of the kernels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from paceline.core.batch import Batch, ModelOutput, Span
from paceline.core.stages import warn
from paceline.kernels.library import DTYPES, CLayer, CModel, check, instructions, library
from paceline.model.backends.base import NATIVE, Adapted, Backend
from paceline.model.backends.counters import NativeWork, count_work, traced
from paceline.model.backends.heads import DraftingHeads, EagleStep
from paceline.model.backends.native.adapter import (
    BatchArrays,
    CachePointers,
    Opened,
    Ropes,
    skipped_flags,
)
from paceline.model.backends.native.copies import rounded_copy
from paceline.model.backends.native.growth import NativeGrowth
from paceline.model.backends.native.heads import NativeEagle, NativeMedusa
from paceline.model.backends.native.layers import Packing
from paceline.model.backends.native.packing import PackedExperts, PackedLinear, pack_children
from paceline.model.backends.native.recognise import STATIC_ROPE, DecoderShape
from paceline.model.paged.segments import KeyValueStore

_PARTIAL_BYTES = 32 << 20  # of attention (csrc/forward.cpp)
_LEFT_OUT = torch.empty(0, 0)  # logits


class NativeModel(Backend):
    """A decoder's packed weights and the calls on them.

    ``skipped``: layers that are left out; the others keep their numbers, so their cache as well.
    """

    name = NATIVE
    runs_torch = False
    same_bits = runs_quantised = True

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
        matrices = sum(matrix.data.nbytes for matrix, _, _ in self._packing.packed)
        self.head_share = self.lm_head.data.nbytes / matrices

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

    @property
    def description(self) -> str:
        return f"{NATIVE} ({instructions()})"

    def without(self, skipped: frozenset[int]) -> NativeModel:
        other = copy.copy(self)
        other.skipped, other._flags = skipped, skipped_flags(skipped, self.num_layers)
        return other

    @property
    def growth(self) -> NativeGrowth:
        """Grows drafts with this model, without the layers that are left out."""
        parts = self._opened, self._ropes, self._caches  # made anew: kept, it would keep the model
        return NativeGrowth(*parts, "grow", self._work, self._flags)

    def scratch_bytes(self, rows: int) -> int:
        """Of float32 activations, and partial results of attention."""
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
        arrays = BatchArrays(batch, cache, self._caches.of(cache))
        wanted, kept, given = arrays.logit_rows, dict[int, torch.Tensor](), None
        if logits:
            given = torch.empty(wanted, self.lm_head.outputs, dtype=self.dtype)
        for layer in sorted(set(features)):
            kept[layer] = torch.empty(arrays.rows, self.hidden_size, dtype=self.dtype)
        arrays.set_outputs(given, kept, self._flags)
        greedy = arrays.set_greedy()
        arrays.set_ropes(self._ropes.reach(arrays.longest))
        with traced("forward"):
            check(library().pl_forward(self._opened.handle, arrays.struct))
        count_work(lambda: self._work(batch.spans, cache, wanted))
        captured = {layer: kept[layer] for layer in features}
        return ModelOutput(_LEFT_OUT if given is None else given, captured, greedy[:])

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.product(hidden, self.decoder.logit_cap)

    def eagle(self, head: Any, model: Adapted) -> EagleStep:
        kind = head.rotary.rope_type
        if kind in STATIC_ROPE:
            return NativeEagle(head, self)
        warn(
            "the EAGLE head runs on the reference backend: "
            f"the rotary embedding {kind} depends on the length"
        )
        return super().eagle(head, model)

    def medusa(self, heads: Any) -> DraftingHeads:
        return NativeMedusa(heads, self)

    def quantised(self, model: Adapted, precision: str) -> tuple[Any, Backend] | None:
        hf = rounded_copy(model, precision)
        return None if hf is None else (hf, NativeModel(hf, self.decoder))


def unpack_modules(hf: Any) -> None:
    """Give a model whose weights were packed its plain ones back."""
    for parent in list(hf.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedLinear | PackedExperts):
                setattr(parent, name, child.plain())

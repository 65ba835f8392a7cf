"""Heads on the native kernels: a step of an EAGLE head, or all Medusa heads, in one call.

They run natively where their target does. Nothing is compared here as for whole models: the modules
are our own, tests compare them, and a draft that is off costs speed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.core.batch import Batch, Span
from paceline.kernels.library import (
    DTYPES,
    SILU,
    CLayer,
    CMedusa,
    CModel,
    CWeight,
    check,
    library,
)
from paceline.model.backends.counters import NativeWork, count_work, traced
from paceline.model.backends.native.adapter import BatchArrays, CachePointers, Opened, Ropes
from paceline.model.backends.native.growth import NativeGrowth
from paceline.model.backends.native.layers import Packing
from paceline.model.backends.native.packing import Packed, pack_children
from paceline.model.backends.native.recognise import DecoderShape
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.segments import KeyValueStore


class HeadTarget(Protocol):
    """What heads share with a target that the kernels run."""

    lm_head: Packed
    embedding: torch.Tensor
    decoder: DecoderShape
    dtype: torch.dtype


class NativeEagle:
    """An EAGLE head whose linear modules are packed, in place: see EagleStep."""

    def __init__(self, head: Any, target: HeadTarget) -> None:
        self.head, self._dtype = head, head.dtype
        config, third = head.config, head.config.version == 3
        module: Any = head.midlayer if third else head.layers[0]
        packing = self._packing = Packing()
        layer = CLayer(
            **packing.matrices(module, self._dtype),
            attention_norm=packing.norm(module.input_layernorm if third else None),
            mlp_norm=packing.norm(module.post_attention_layernorm),
        )
        has_head = third and config.has_lm_head
        lm_head = pack_children(head, ("lm_head",), self._dtype) if has_head else target.lm_head
        embedding, scale = target.embedding, target.decoder.embedding_scale
        if head.embed_tokens is not None:
            embedding, scale = head.embed_tokens.weight.detach(), 1.0
        packing.keep(layer, embedding)
        self._opened = Opened(
            CModel(
                dtype=DTYPES[self._dtype],
                hidden=config.hidden_size,
                vocab=lm_head.outputs,
                words=config.vocab_size,
                layers=1,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                ffn=config.ffn_size,
                activation=SILU,
                embedding_scale=scale,
                scaling=config.head_dim**-0.5,
                embedding=embedding.data_ptr(),
                layer=(CLayer * 1)(layer),
                final_norm=packing.norm(head.norm if third else None),
                head=packing.weight(lm_head),
                fuse=packing.weight(pack_children(head, ("fc",), self._dtype)),
                hidden_norm=packing.norm(module.hidden_norm if third else None),
                residual_normed=config.norm_before_residual,
            )
        )
        self._lm_head = lm_head
        self._ropes = Ropes(head.rotary, (None,))
        self._caches = CachePointers(1)

    @property
    def growth(self) -> NativeGrowth | None:
        """See EagleStep."""
        return NativeGrowth(self._opened, self._ropes, self._caches, "eagle", self._work)

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See EagleStep."""
        arrays = BatchArrays(batch, cache, self._caches.of(cache))
        wanted = arrays.logit_rows
        outputs = torch.empty(wanted, self.head.config.hidden_size, dtype=self._dtype)
        logits = torch.empty(wanted, self._lm_head.outputs, dtype=self._dtype)
        arrays.set_outputs(logits, {})
        arrays.set_features(hidden.contiguous(), fused, outputs)
        arrays.set_ropes(self._ropes.reach(arrays.longest))
        with traced("eagle"):
            check(library().pl_forward(self._opened.handle, arrays.struct))
        count_work(lambda: self._work(batch.spans, cache, wanted))
        return outputs, logits

    def _work(self, spans: Sequence[Span], cache: KeyValueStore, wanted: int) -> NativeWork:
        width = self.head.config.heads * self.head.config.head_dim
        return self._packing.work(spans, cache, wanted, self._lm_head, width, 1)


class NativeMedusa:
    """Medusa heads, packed: logits ``[B, count, vocab]`` of the first ``count``, from features
    ``[B, width]``."""

    def __init__(self, heads: Any, target: HeadTarget) -> None:
        config = self._config = heads.config
        self._spread = heads.spread  # over the target's vocabulary
        self._dtype = target.dtype
        blocks = self._blocks = [
            pack_children(block, ("linear",), self._dtype)
            for head in heads
            for block in list(head.children())[: config.layers]
        ]
        last = str(config.layers)
        layers = self._layers = (
            [target.lm_head]
            if config.shared_head
            else [pack_children(head, (last,), self._dtype) for head in heads]
        )
        self._vocabulary = layers[0].outputs
        self._struct = CMedusa(
            dtype=DTYPES[self._dtype],
            width=config.hidden_size,
            vocab=self._vocabulary,
            heads=config.heads,
            blocks=config.layers,
            shared=config.shared_head,
            logit_cap=target.decoder.logit_cap if config.shared_head else 0.0,
            block=(CWeight * len(blocks))(*(block.struct() for block in blocks)),
            head=(CWeight * len(layers))(*(layer.struct() for layer in layers)),
        )

    def __call__(self, features: torch.Tensor, count: int) -> torch.Tensor:
        rows = features.contiguous()
        logits = torch.empty(len(rows), count, self._vocabulary, dtype=self._dtype)
        sizes = len(rows), count
        arguments = rows.data_ptr(), *sizes, logits.data_ptr(), torch.get_num_threads()
        with traced("medusa"):
            check(library().pl_medusa_logits(self._struct, *arguments))
        count_work(lambda: self._work(*sizes))
        widened: torch.Tensor = self._spread(logits)
        return widened

    def _work(self, rows: int, count: int) -> NativeWork:
        blocks, layers = self._blocks[: count * self._config.layers], self._layers[:count]
        head_rows = rows * count if self._config.shared_head else rows
        return NativeWork((*(b.read(rows) for b in blocks), *(h.read(head_rows) for h in layers)))

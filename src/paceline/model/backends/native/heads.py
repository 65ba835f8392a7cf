"""Draft heads in the kernels. They are not compared with the reference before use: a wrong draft
costs speed, never text."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from paceline.core.batch import Batch
from paceline.core.stages import warn
from paceline.kernels.library import DTYPES, SILU, CLayer, CMedusa, CModel, CWeight, check, library
from paceline.model.backends.base import BlockStep, EagleStep
from paceline.model.backends.native.handle import ModelHandle, count_logit_rows, traced
from paceline.model.backends.native.packing import PackedMatrix, WeightPacker, pack_children
from paceline.model.backends.native.recognise import (
    QUERY_KEY_NORMS,
    STATIC_ROPE,
    DecoderShape,
    Rotation,
    scaled_norm,
)
from paceline.model.paged.cache import PagedCache
from paceline.model.quantised.convert import walk_children
from paceline.model.quantised.weights import QuantisedLinear


class HeadTarget(Protocol):
    """What heads use of the model that they draft for; ``NativeModel`` fulfils it."""

    dtype: torch.dtype
    decoder: DecoderShape
    lm_head: PackedMatrix
    embedding: torch.Tensor

    def head(self, hidden: torch.Tensor) -> torch.Tensor: ...


def can_run_head(head: Any, name: str) -> bool:
    """Whether the kernels can run a head's decoder layers; a warning says why not."""
    kind = head.rotary.rope_type
    if kind not in STATIC_ROPE:
        warn(
            f"the {name} head runs on the reference backend: "
            f"the rotary embedding {kind} depends on the length"
        )
    return kind in STATIC_ROPE


def pack_linears(head: Any, dtype: torch.dtype) -> Any:
    """Pack all linear modules of ``head`` in place that are not packed; returns it."""
    for parent, name, child in walk_children(head):
        if type(child) is nn.Linear or isinstance(child, QuantisedLinear):
            pack_children(parent, (name,), dtype)
    return head


def _head_model(
    head: Any, layers: Sequence[Any], target: HeadTarget, weights: WeightPacker, /, **fields: Any
) -> Any:
    """The CModel of a head with these decoder ``layers``, whose linear modules are packed in place;
    ``weights`` owns what it points to. ``fields``: those in which heads differ."""
    config, dtype = head.config, head.dtype
    packed = [
        CLayer(
            **weights.pack_layer(module, dtype),
            attention_norm=weights.norm(getattr(module, "input_layernorm", None)),
            mlp_norm=weights.norm(module.post_attention_layernorm),
            **{
                name: weights.norm(norm)
                for name in QUERY_KEY_NORMS
                if isinstance(norm := getattr(module.self_attn, name), nn.RMSNorm)  # not in EAGLE
            },
        )
        for module in layers
    ]
    embedding, scale = target.embedding, target.decoder.embedding_scale
    if head.embed_tokens is not None:
        embedding, scale = head.embed_tokens.weight.detach(), 1.0
    weights.keep_alive += (*packed, embedding)
    return CModel(
        dtype=DTYPES[dtype],
        hidden=config.hidden_size,
        embedding_rows=config.vocab_size,
        layers=len(packed),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ffn=config.ffn_size,
        activation=SILU,
        embedding_scale=scale,
        scaling=config.head_dim**-0.5,
        embedding=embedding.data_ptr(),
        layer=(CLayer * len(packed))(*packed),
        fuse=weights.add(pack_children(head, ("fc",), dtype)),
        **fields,
    )


class NativeEagle(EagleStep):
    """An EAGLE head whose linear modules are packed in place."""

    def __init__(self, head: Any, target: HeadTarget) -> None:
        self.head, self._dtype = head, head.dtype
        config, third = head.config, head.config.version == 3
        weights = WeightPacker()
        has_head = third and config.has_lm_head
        lm_head = pack_children(head, ("lm_head",), self._dtype) if has_head else target.lm_head
        model = _head_model(
            head,
            head.decoder,
            target,
            weights,
            vocab=lm_head.outputs,
            final_norm=weights.norm(head.norm if third else None),
            head_norm=weights.norm(
                scaled_norm(head.norm, target.decoder.logit_scale)
                if third and not has_head
                else None
            ),
            head=weights.add(lm_head),
            hidden_norm=weights.norm(head.midlayer.hidden_norm if third else None),
            residual_normed=config.norm_before_residual,
        )
        self._vocab_size = lm_head.outputs
        self._handle = ModelHandle(model, weights, Rotation(head.rotary))
        self.tree_grower = partial(self._handle.grow, "eagle", None)

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logit_rows, hidden = count_logit_rows(batch), hidden.contiguous()
        outputs = torch.empty(logit_rows, self.head.config.hidden_size, dtype=self._dtype)
        logits = torch.empty(logit_rows, self._vocab_size, dtype=self._dtype)
        fields = {"logits": logits.data_ptr(), "outputs": outputs.data_ptr()}
        self._handle.forward("eagle", batch, cache, hidden=hidden.data_ptr(), fused=fused, **fields)
        return outputs, logits


class NativeBlock(BlockStep):
    """A block drafter whose linear modules are packed in place."""

    def __init__(self, head: Any, target: HeadTarget) -> None:
        self.head, weights = head, WeightPacker()
        model = _head_model(
            head,
            head.layers,
            target,
            weights,
            final_norm=weights.norm(head.norm),
            hidden_norm=weights.norm(head.hidden_norm),
            block=1 if head.config.causal else 2,
        )
        pack_linears(head, head.dtype)  # outside the layers: biases, and the head's own lm_head
        self.logits = head.lm_head or target.head
        self._handle = ModelHandle(model, weights, Rotation(head.rotary))

    def write_context(self, batch: Batch, cache: PagedCache, features: torch.Tensor) -> None:
        features = features.contiguous()
        batch = replace(batch, logit_rows=())
        self._handle.forward("block context", batch, cache, hidden=features.data_ptr())

    def __call__(self, batch: Batch, cache: PagedCache) -> torch.Tensor:
        config = self.head.config
        outputs = torch.empty(len(batch.input_ids), config.hidden_size, dtype=self.head.dtype)
        layer, output = ctypes.c_int32(config.layers), ctypes.c_void_p(outputs.data_ptr())
        fields = {"feature_layers": ctypes.addressof(layer), "feature": ctypes.addressof(output)}
        batch = replace(batch, logit_rows=())
        self._handle.forward("block", batch, cache, features=1, **fields)
        return outputs


class NativeMedusa:
    """Medusa heads whose weights are packed in place; a ``DraftingHeads`` (backends/base.py)."""

    def __init__(self, heads: Any, target: HeadTarget) -> None:
        config = self._config = heads.config
        self._spread = heads.spread  # maps logits of the heads' vocabulary to the target's
        dtype = self._dtype = target.dtype
        blocks = self._blocks = [
            pack_children(block, ("linear",), dtype)
            for head in heads
            for block in list(head.children())[: config.layers]
        ]
        layers = self._layers = [target.lm_head]
        if not config.shared_head:
            layers[:] = [pack_children(head, (str(config.layers),), dtype) for head in heads]
        self._vocab_size = layers[0].outputs
        self._struct = CMedusa(
            dtype=DTYPES[dtype],
            width=config.hidden_size,
            vocab=self._vocab_size,
            heads=config.heads,
            blocks=config.layers,
            shared=config.shared_head,
            logit_cap=target.decoder.logit_cap if config.shared_head else 0.0,
            block=(CWeight * len(blocks))(*(block.struct() for block in blocks)),
            head=(CWeight * len(layers))(*(layer.struct() for layer in layers)),
        )

    def __call__(self, features: torch.Tensor, count: int) -> torch.Tensor:
        rows = features.contiguous()
        logits = torch.empty(len(rows), count, self._vocab_size, dtype=self._dtype)
        arguments = rows.data_ptr(), len(rows), count, logits.data_ptr(), torch.get_num_threads()
        with traced("medusa"):
            check(library().pl_medusa_logits(self._struct, *arguments))
        widened: torch.Tensor = self._spread(logits)
        return widened

"""Forwards in one call of the kernels: of a decoder, and of draft heads on its features."""

from __future__ import annotations

import copy
import ctypes
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.adapter import Adapter
from paceline.core.batch import Batch, ModelOutput
from paceline.core.memory import trim
from paceline.core.stages import warn
from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import (
    DTYPES,
    SILU,
    CLayer,
    CMedusa,
    CModel,
    CWeight,
    check,
    instructions,
    library,
)
from paceline.model.backends.base import (
    NATIVE,
    Backend,
    BackendModel,
    BlockStep,
    DraftingHeads,
    EagleStep,
    TreeGrower,
    relative_error,
    trial_logits,
)
from paceline.model.backends.counters import NativeWork, report_work, traced
from paceline.model.backends.native.adapters import NativeAdapters
from paceline.model.backends.native.copies import rounded_copy
from paceline.model.backends.native.handle import ModelHandle, count_logit_rows
from paceline.model.backends.native.packing import PackedLinear, WeightPacker, pack_children
from paceline.model.backends.native.recognise import (
    HEAD_NORMS,
    STATIC_ROPE,
    DecoderShape,
    describe_decoder,
    scaled_norm,
)
from paceline.model.paged.cache import PagedCache
from paceline.model.quantised.convert import Experts, walk_children

_PARTIAL_BYTES = 32 << 20  # partial results of attention (csrc/attention_plan.cpp)
_NO_LOGITS = torch.empty(0, 0)


class NativeModel(Backend):
    """The native backend of one decoder: its packed weights and the kernel calls on them."""

    name = NATIVE
    runs_torch = False
    batch_invariant = runs_quantised = True

    def __init__(self, hf: Any, decoder: DecoderShape) -> None:
        """Pack the weights of ``hf`` in place, layer by layer."""
        self.decoder, self.dtype = decoder, hf.dtype
        self.vocab_size, self.hidden_size = hf.model.embed_tokens.weight.shape
        self.num_layers = len(hf.model.layers)
        self._skipped: Any = None  # a C array with a flag for each layer; None: all layers run
        weights = WeightPacker()
        layers = (CLayer * self.num_layers)(
            *(self._layer(layer, n, weights) for n, layer in enumerate(hf.model.layers))
        )
        self.lm_head = pack_children(hf, ("lm_head",), self.dtype)
        self.embedding = hf.model.embed_tokens.weight.detach().contiguous()
        weights.keep_alive += (layers, self.embedding)
        model = CModel(
            dtype=DTYPES[self.dtype],
            hidden=self.hidden_size,
            vocab=self.lm_head.outputs,
            embedding_rows=self.vocab_size,
            layers=self.num_layers,
            **decoder.fields(),
            embedding=self.embedding.data_ptr(),
            layer=layers,
            final_norm=weights.norm(decoder.final_norm),
            head_norm=weights.norm(scaled_norm(decoder.final_norm, decoder.logit_scale)),
            head=weights.add(self.lm_head, None),
        )
        trim()
        self.adapters = NativeAdapters(hf, self.dtype)
        rotary_emb, kinds = hf.model.rotary_emb, decoder.rope_kinds
        self._handle = ModelHandle(model, weights, rotary_emb, kinds, self.adapters)
        total_bytes = sum(matrix.data.nbytes for matrix, _, _ in weights.matrices)
        self.head_share = self.lm_head.data.nbytes / total_bytes

    def _layer(self, layer: Any, index: int, weights: WeightPacker) -> Any:
        return CLayer(
            **weights.pack_layer(layer, self.dtype, index),
            **{name: weights.norm(norm) for name, norm in self.decoder.norms[index].items()},
            window=self.decoder.windows[index],
            rope=self.decoder.ropes[index],
        )

    @property
    def description(self) -> str:
        return f"{NATIVE} ({instructions()})"

    def without_layers(self, skipped: frozenset[int]) -> NativeModel:
        other = copy.copy(self)
        flags = (n in skipped for n in range(self.num_layers))
        other._skipped = (ctypes.c_uint8 * self.num_layers)(*flags) if skipped else None
        return other

    @property
    def tree_grower(self) -> TreeGrower:
        """Grows draft trees with this model, without the layers that are left out."""
        return partial(self._handle.grow, "grow", self._skipped)

    def scratch_bytes(self, rows: int) -> int:
        """Float32 activations, and partial results of attention."""
        shape = self.decoder
        width: int = 4 * self.hidden_size + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        return 4 * rows * (width + shape.ffn) + _PARTIAL_BYTES

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        logit_rows, logits, fields = count_logit_rows(batch), _NO_LOGITS, dict[str, Any]()
        if not batch.choices_only:
            logits = torch.empty(logit_rows, self.lm_head.outputs, dtype=self.dtype)
            fields["logits"] = logits.data_ptr()
        shape = len(batch.input_ids), self.hidden_size
        features = {n: torch.empty(shape, dtype=self.dtype) for n in sorted(set(batch.features))}
        if features:
            layers = (ctypes.c_int32 * len(features))(*features)
            outputs = (ctypes.c_void_p * len(features))(*(t.data_ptr() for t in features.values()))
            fields |= {"features": len(features), "feature_layers": ctypes.addressof(layers)}
            fields["feature"] = ctypes.addressof(outputs)
        greedy = (ctypes.c_int32 * logit_rows)()
        fields["greedy"] = ctypes.addressof(greedy)
        self._handle.forward("forward", batch, cache, self._skipped, **fields)
        return ModelOutput(logits, {layer: features[layer] for layer in batch.features}, greedy[:])

    def check_adapter(self, adapter: Adapter) -> None:
        self.adapters.check(adapter)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = self.decoder.logit_scale
        hidden = hidden if scale == 1 else hidden * scale
        return self.lm_head.multiply(hidden, self.decoder.logit_cap)

    def eagle(self, head: Any, model: BackendModel) -> EagleStep:
        return NativeEagle(head, self) if _runs_head(head, "EAGLE") else super().eagle(head, model)

    def block(self, head: Any, model: BackendModel) -> BlockStep:
        return NativeBlock(head, self) if _runs_head(head, "block") else super().block(head, model)

    def medusa(self, heads: Any) -> DraftingHeads:
        return NativeMedusa(heads, self)

    def quantised(self, model: BackendModel, precision: str) -> tuple[Any, Backend] | None:
        hf = rounded_copy(model, precision)
        return None if hf is None else (hf, NativeModel(hf, self.decoder))


# -- heads -------------------------------------------------------------------------------------
# Heads are not compared with the reference before use: a wrong draft costs speed, never text.


def _runs_head(head: Any, name: str) -> bool:
    """Whether the kernels can run a head's decoder layers; a warning says why not."""
    kind = head.rotary.rope_type
    if kind not in STATIC_ROPE:
        warn(
            f"the {name} head runs on the reference backend: "
            f"the rotary embedding {kind} depends on the length"
        )
    return kind in STATIC_ROPE


def _head_model(
    head: Any, layers: Sequence[Any], target: NativeModel, weights: WeightPacker, /, **fields: Any
) -> Any:
    """The CModel of a head with these decoder ``layers``, whose linear modules are packed in place;
    ``weights`` owns what it points to. ``fields``: those in which heads differ."""
    config, dtype = head.config, head.dtype
    packed = [
        CLayer(
            **weights.pack_layer(module, dtype),
            attention_norm=weights.norm(getattr(module, "input_layernorm", None)),
            mlp_norm=weights.norm(module.post_attention_layernorm),
            **{name: weights.norm(norm) for name, norm in _query_norms(module.self_attn).items()},
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


def _query_norms(attention: Any) -> dict[str, Any]:
    """The RMS norms of each head's queries and keys; EAGLE heads have none."""
    norms = {name: getattr(attention, name) for name in HEAD_NORMS}
    return {name: norm for name, norm in norms.items() if isinstance(norm, nn.RMSNorm)}


class NativeEagle(EagleStep):
    """An EAGLE head whose linear modules are packed in place."""

    def __init__(self, head: Any, target: NativeModel) -> None:
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
            head=weights.add(lm_head, None),
            hidden_norm=weights.norm(head.midlayer.hidden_norm if third else None),
            residual_normed=config.norm_before_residual,
        )
        self._vocab_size = lm_head.outputs
        self._handle = ModelHandle(model, weights, head.rotary)
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

    def __init__(self, head: Any, target: NativeModel) -> None:
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
        for parent, name, child in walk_children(head):
            if type(child) is nn.Linear:  # outside the layers: biases, and the head's own lm_head
                pack_children(parent, (name,), head.dtype)
        self.logits = head.lm_head or target.head
        self._context_matrices = [
            module.packed
            for module in (head.fc, *(layer.self_attn.q_proj for layer in head.layers))
        ]
        self._handle = ModelHandle(model, weights, head.rotary)

    def write_context(self, batch: Batch, cache: PagedCache, features: torch.Tensor) -> None:
        features, rows = features.contiguous(), len(batch.input_ids)
        batch = replace(batch, logit_rows=())
        self._handle.run("block context", batch, cache, hidden=features.data_ptr())
        report_work(
            lambda: [NativeWork(tuple(m.weight_read(rows) for m in self._context_matrices))]
        )

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

    def __init__(self, heads: Any, target: NativeModel) -> None:
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
        report_work(lambda: [self._work(len(rows), count)])
        widened: torch.Tensor = self._spread(logits)
        return widened

    def _work(self, rows: int, count: int) -> NativeWork:
        blocks, layers = self._blocks[: count * self._config.layers], self._layers[:count]
        head_rows = rows * count if self._config.shared_head else rows
        reads = [block.weight_read(rows) for block in blocks]
        return NativeWork((*reads, *(layer.weight_read(head_rows) for layer in layers)))


@torch.inference_mode()
def native_backend(model: BackendModel) -> Backend | str:
    """The native backend of ``model``, whose weights it packs in place, or the reason why the
    kernels cannot run it. A backend whose logits differ from the reference's is refused."""
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    decoder = describe_decoder(model.hf, model.cache_shapes, model.patterns)
    if isinstance(decoder, str):
        return decoder
    reference_logits = trial_logits(model)
    native = NativeModel(model.hf, decoder)
    # The error of the median row, in the worst sequence. For SmolLM2, rows computed in bf16 differ
    # from float32 by 2 to 72 % in the reference (most of them by 4 %) and by 1 to 6 % in the
    # kernels, which round less.
    difference = max(
        statistics.median(map(relative_error, ours, theirs))
        for ours, theirs in zip(trial_logits(model, native), reference_logits, strict=True)
    )
    # A decoder that is described wrongly differs by far more than rounding does.
    if difference < _allowed_difference(model):
        return native
    unpack_modules(model.hf)
    return f"the kernels' logits are {difference:.0%} off"


def _allowed_difference(model: BackendModel) -> float:
    """How far the kernels' logits may be from the reference's. With quantised activations a small
    rounding difference may move a value to the next code: SmolLM2 in float32 differs by 4 % with 8
    bits and by 5 % with 4 bits, in bf16 by more."""
    in_float32 = model.dtype == torch.float32
    packed = [m.packed for m in model.hf.modules() if isinstance(m, PackedLinear)]
    formats = [matrix.form for matrix in packed if matrix.form is not None]
    if not formats:
        return 1e-3 if in_float32 else 0.25
    return 0.15 if in_float32 and all(form.bits == 8 for form in formats) else 0.4


def unpack_modules(hf: Any) -> None:
    """Replace the packed modules of a model by modules of the kind that they replaced."""
    for parent, name, child in walk_children(hf):
        if isinstance(child, PackedLinear):
            setattr(parent, name, child.plain())
    for parent, name, child in walk_children(hf):
        if isinstance(child, Experts):
            setattr(parent, name, child.merged())

"""Forwards by one call of the kernels: of a model, and of heads on its features."""

from __future__ import annotations

import copy
import ctypes
import statistics
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
    Adapted,
    Backend,
    BlockStep,
    DraftingHeads,
    EagleStep,
    Growth,
    relative_error,
    trial_logits,
)
from paceline.model.backends.counters import NativeWork, count_work, traced
from paceline.model.backends.native.adapters import NativeAdapters
from paceline.model.backends.native.copies import rounded_copy
from paceline.model.backends.native.handle import ModelHandle, rows_of_logits
from paceline.model.backends.native.packing import PackedLinear, Packing, pack_children
from paceline.model.backends.native.recognise import STATIC_ROPE, DecoderShape, describe, scaled
from paceline.model.paged.cache import PagedCache
from paceline.model.quantised.convert import Experts, children

_PARTIAL_BYTES = 32 << 20  # of attention (csrc/forward.cpp)
_LEFT_OUT = torch.empty(0, 0)  # logits


class NativeModel(Backend):
    """A decoder's packed weights and the calls on them."""

    name = NATIVE
    runs_torch = False
    same_bits = runs_quantised = True

    def __init__(self, hf: Any, decoder: DecoderShape) -> None:
        """Packs the weights of ``hf`` in place, layer by layer."""
        self.decoder, self.dtype = decoder, hf.dtype
        self.vocab_size, self.hidden_size = hf.model.embed_tokens.weight.shape
        self.num_layers = len(hf.model.layers)
        self._skipped: Any = None  # a flag for each layer, if some are left out
        packing = Packing()
        layers = (CLayer * self.num_layers)(
            *(self._layer(layer, n, packing) for n, layer in enumerate(hf.model.layers))
        )
        self.lm_head = pack_children(hf, ("lm_head",), self.dtype)
        self.embedding = hf.model.embed_tokens.weight.detach().contiguous()
        packing.alive += (layers, self.embedding)
        model = CModel(
            dtype=DTYPES[self.dtype],
            hidden=self.hidden_size,
            vocab=self.lm_head.outputs,
            words=self.vocab_size,
            layers=self.num_layers,
            **decoder.fields(),
            embedding=self.embedding.data_ptr(),
            layer=layers,
            final_norm=packing.norm(decoder.final_norm),
            head_norm=packing.norm(scaled(decoder.final_norm, decoder.logit_scale)),
            head=packing.weight(self.lm_head, None),
        )
        trim()
        self.adapters = NativeAdapters(hf, self.dtype)
        kinds = decoder.rope_kinds
        self._handle = ModelHandle(model, packing, hf.model.rotary_emb, kinds, self.adapters)
        matrices = sum(matrix.data.nbytes for matrix, _, _ in packing.packed)
        self.head_share = self.lm_head.data.nbytes / matrices

    def _layer(self, layer: Any, index: int, packing: Packing) -> Any:
        return CLayer(
            **packing.matrices(layer, self.dtype, index),
            **{name: packing.norm(norm) for name, norm in self.decoder.norms[index].items()},
            window=self.decoder.windows[index],
            rope=self.decoder.ropes[index],
        )

    @property
    def description(self) -> str:
        return f"{NATIVE} ({instructions()})"

    def without(self, skipped: frozenset[int]) -> NativeModel:
        other = copy.copy(self)
        flags = (n in skipped for n in range(self.num_layers))
        other._skipped = (ctypes.c_uint8 * self.num_layers)(*flags) if skipped else None
        return other

    @property
    def growth(self) -> Growth:
        """Grows drafts with this model, without the layers that are left out."""
        return partial(self._handle.grow, "grow", self._skipped)

    def scratch_bytes(self, rows: int) -> int:
        """Float32 activations, and partial results of attention."""
        shape = self.decoder
        width: int = 4 * self.hidden_size + 2 * (shape.heads + shape.kv_heads) * shape.head_dim
        return 4 * rows * (width + shape.ffn) + _PARTIAL_BYTES

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput:
        wanted, logits, fields = rows_of_logits(batch), _LEFT_OUT, dict[str, Any]()
        if not batch.choices_only:
            logits = torch.empty(wanted, self.lm_head.outputs, dtype=self.dtype)
            fields["logits"] = logits.data_ptr()
        shape = len(batch.input_ids), self.hidden_size
        kept = {n: torch.empty(shape, dtype=self.dtype) for n in sorted(set(batch.features))}
        if kept:
            layers = (ctypes.c_int32 * len(kept))(*kept)
            outputs = (ctypes.c_void_p * len(kept))(*(t.data_ptr() for t in kept.values()))
            fields |= {"features": len(kept), "feature_layers": ctypes.addressof(layers)}
            fields["feature"] = ctypes.addressof(outputs)
        greedy = (ctypes.c_int32 * wanted)()
        fields["greedy"] = ctypes.addressof(greedy)
        self._handle.forward("forward", batch, cache, self._skipped, **fields)
        return ModelOutput(logits, {layer: kept[layer] for layer in batch.features}, greedy[:])

    def check_adapter(self, adapter: Adapter) -> None:
        self.adapters.check(adapter)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = self.decoder.logit_scale
        hidden = hidden if scale == 1 else hidden * scale
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

    def block(self, head: Any, model: Adapted) -> BlockStep:
        """Its linear products run in the kernels, packed in place; the rest are torch's."""
        for parent, name, child in children(head):
            if type(child) is nn.Linear:
                pack_children(parent, (name,), self.dtype)
        return super().block(head, model)

    def medusa(self, heads: Any) -> DraftingHeads:
        return NativeMedusa(heads, self)

    def quantised(self, model: Adapted, precision: str) -> tuple[Any, Backend] | None:
        hf = rounded_copy(model, precision)
        return None if hf is None else (hf, NativeModel(hf, self.decoder))


# -- heads -------------------------------------------------------------------------------------
# Without a trial against the reference: a wrong draft costs speed alone.


class NativeEagle(EagleStep):
    """An EAGLE head whose linear modules are packed in place."""

    def __init__(self, head: Any, target: NativeModel) -> None:
        self.head, self._dtype = head, head.dtype
        config, third = head.config, head.config.version == 3
        packing = Packing()
        layers = [
            CLayer(
                **packing.matrices(module, self._dtype),
                attention_norm=packing.norm(getattr(module, "input_layernorm", None)),
                mlp_norm=packing.norm(module.post_attention_layernorm),
            )
            for module in head.decoder
        ]
        has_head = third and config.has_lm_head
        lm_head = pack_children(head, ("lm_head",), self._dtype) if has_head else target.lm_head
        embedding, scale = target.embedding, target.decoder.embedding_scale
        if head.embed_tokens is not None:
            embedding, scale = head.embed_tokens.weight.detach(), 1.0
        packing.alive += (*layers, embedding)
        model = CModel(
            dtype=DTYPES[self._dtype],
            hidden=config.hidden_size,
            vocab=lm_head.outputs,
            words=config.vocab_size,
            layers=len(layers),
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            ffn=config.ffn_size,
            activation=SILU,
            embedding_scale=scale,
            scaling=config.head_dim**-0.5,
            embedding=embedding.data_ptr(),
            layer=(CLayer * len(layers))(*layers),
            final_norm=packing.norm(head.norm if third else None),
            head_norm=packing.norm(
                scaled(head.norm, target.decoder.logit_scale) if third and not has_head else None
            ),
            head=packing.weight(lm_head, None),
            fuse=packing.weight(pack_children(head, ("fc",), self._dtype)),
            hidden_norm=packing.norm(head.midlayer.hidden_norm if third else None),
            residual_normed=config.norm_before_residual,
        )
        self._vocabulary = lm_head.outputs
        self._handle = ModelHandle(model, packing, head.rotary)
        self.growth = partial(self._handle.grow, "eagle", None)

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wanted, hidden = rows_of_logits(batch), hidden.contiguous()
        outputs = torch.empty(wanted, self.head.config.hidden_size, dtype=self._dtype)
        logits = torch.empty(wanted, self._vocabulary, dtype=self._dtype)
        fields = {"logits": logits.data_ptr(), "outputs": outputs.data_ptr()}
        self._handle.forward("eagle", batch, cache, hidden=hidden.data_ptr(), fused=fused, **fields)
        return outputs, logits


class NativeMedusa:
    """Medusa heads, packed in place; called as DraftingHeads (base.py)."""

    def __init__(self, heads: Any, target: NativeModel) -> None:
        config = self._config = heads.config
        self._spread = heads.spread  # over the target's vocabulary
        dtype = self._dtype = target.dtype
        blocks = self._blocks = [
            pack_children(block, ("linear",), dtype)
            for head in heads
            for block in list(head.children())[: config.layers]
        ]
        layers = self._layers = [target.lm_head]
        if not config.shared_head:
            layers[:] = [pack_children(head, (str(config.layers),), dtype) for head in heads]
        self._vocabulary = layers[0].outputs
        self._struct = CMedusa(
            dtype=DTYPES[dtype],
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
        arguments = rows.data_ptr(), len(rows), count, logits.data_ptr(), torch.get_num_threads()
        with traced("medusa"):
            check(library().pl_medusa_logits(self._struct, *arguments))
        count_work(lambda: [self._work(len(rows), count)])
        widened: torch.Tensor = self._spread(logits)
        return widened

    def _work(self, rows: int, count: int) -> NativeWork:
        blocks, layers = self._blocks[: count * self._config.layers], self._layers[:count]
        head_rows = rows * count if self._config.shared_head else rows
        return NativeWork((*(b.read(rows) for b in blocks), *(h.read(head_rows) for h in layers)))


@torch.inference_mode()
def native_backend(model: Adapted) -> Backend | str:
    """The kernels with the model's weights, whose layout they change, or why they cannot run it."""
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    shape = describe(model.hf, model.cache_shapes, model.patterns)
    if isinstance(shape, str):
        return shape
    wanted = trial_logits(model)
    native = NativeModel(model.hf, shape)
    # The median row's error, of the worst sequence. In bf16 SmolLM2's rows are 2 to 72 % off those
    # of float32 in the reference, most 4 %, and 1 to 6 % in the kernels, which round less.
    difference = max(
        statistics.median(map(relative_error, ours, theirs))
        for ours, theirs in zip(trial_logits(model, native), wanted, strict=True)
    )
    # An incomplete description is wrong by far more than rounding.
    if difference < _limit(model):
        return native
    unpack_modules(model.hf)
    return f"the kernels' logits are {difference:.0%} off"


def _limit(model: Adapted) -> float:
    """How far logits may be apart. Rounding may change a whole code of quantised activations:
    SmolLM2 in float32 differs by 4 % with 8 bits, by 5 % with 4 bits, in bf16 by more."""
    exact = model.dtype == torch.float32
    packed = [m.packed for m in model.hf.modules() if isinstance(m, PackedLinear)]
    forms = [one.form for one in packed if one.form is not None]
    if not forms:
        return 1e-3 if exact else 0.25
    return 0.15 if exact and all(form.bits == 8 for form in forms) else 0.4


def unpack_modules(hf: Any) -> None:
    """Replace the packed modules of a model by plain ones."""
    for parent, name, child in children(hf):
        if isinstance(child, PackedLinear):
            setattr(parent, name, child.plain())
    for parent, name, child in children(hf):
        if isinstance(child, Experts):
            setattr(parent, name, child.whole())

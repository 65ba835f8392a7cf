"""The native backend: a decoder's forward in one call of the kernels."""

from __future__ import annotations

import copy
import ctypes
import statistics
from functools import partial
from typing import Any

import torch

from paceline.core.adapter import Adapter
from paceline.core.batch import Batch, ModelOutput
from paceline.core.memory import trim
from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import DTYPES, CLayer, CModel, instructions, library
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
from paceline.model.backends.native.adapters import NativeAdapters
from paceline.model.backends.native.copies import rounded_copy
from paceline.model.backends.native.handle import ModelHandle, count_logit_rows
from paceline.model.backends.native.heads import (
    NativeBlock,
    NativeEagle,
    NativeMedusa,
    can_run_head,
    pack_linears,
)
from paceline.model.backends.native.packing import PackedLinear, WeightPacker, pack_children
from paceline.model.backends.native.recognise import DecoderShape, describe_decoder, scaled_norm
from paceline.model.paged.cache import PagedCache

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
            head=weights.add(self.lm_head),
        )
        trim()
        self.adapters = NativeAdapters(hf, self.dtype)
        self._handle = ModelHandle(model, weights, decoder.rotation, self.adapters)
        total_bytes = sum(matrix.data.nbytes for matrix in weights.matrices)
        self.head_share = self.lm_head.data.nbytes / total_bytes

    def _layer(self, layer: Any, index: int, weights: WeightPacker) -> Any:
        return CLayer(
            **weights.pack_layer(layer, self.dtype),
            **{name: weights.norm(norm) for name, norm in self.decoder.norms[index].items()},
            sinks=weights.numbers(getattr(layer.self_attn, "sinks", None)),
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

    def packed(self, head: Any) -> Any:
        return pack_linears(head, self.dtype)

    def eagle(self, head: Any, model: BackendModel) -> EagleStep:
        if can_run_head(head, "EAGLE"):
            return NativeEagle(head, self)
        return super().eagle(self.packed(head), model)

    def block(self, head: Any, model: BackendModel) -> BlockStep:
        if can_run_head(head, "block"):
            return NativeBlock(head, self)
        return super().block(self.packed(head), model)

    def medusa(self, heads: Any) -> DraftingHeads:
        return NativeMedusa(heads, self)

    def quantised(self, model: BackendModel, precision: str) -> tuple[Any, Backend] | None:
        hf = rounded_copy(model, precision)
        return None if hf is None else (hf, NativeModel(hf, self.decoder))


@torch.inference_mode()
def native_backend(model: BackendModel) -> Backend | str:
    """The native backend of ``model``, whose weights it packs in place, or the reason why the
    kernels cannot run it. A backend whose logits differ from the reference's is refused; torch runs
    the packed modules as well, but slowly."""
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    before = {module: dict(module._modules) for module in model.hf.modules()}
    decoder = describe_decoder(model.hf, model.cache_shapes, model.patterns)
    if isinstance(decoder, str):
        for module, children in before.items():
            module._modules = children
        return decoder
    del before  # packing frees the weights of one layer after the other
    reference_logits = trial_logits(model)
    model.packed = True
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

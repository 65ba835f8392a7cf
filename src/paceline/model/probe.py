"""Finds out how a loaded model uses attention, by a forward over two tokens.

Two attention functions are registered with transformers: the real one, for which transformers
builds no masks, and a probe. The probe's masks carry a layer's window or chunk size as numbers. So
these are not guessed from the config, and layers that do not call the function are noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.core.batch import Batch, Span
from paceline.core.bound import bound
from paceline.core.transfer import Staging
from paceline.errors import UnsupportedModelError
from paceline.model.backends.base import relative_error
from paceline.model.backends.reference.attention import STEP, paged_attention
from paceline.model.backends.reference.backend import TorchBackend
from paceline.model.backends.reference.recurrent import adapt_mixers
from paceline.model.paged.cache import LayerShape
from paceline.model.paged.segments import FULL, DeviceBatch, Pattern
from paceline.model.paged.states import StatePart
from paceline.model.precision import is_quantised

ATTENTION = "paceline"
PROBE = "paceline_probe"
STATELESS = {"mlp", "moe", "dummy"}  # types of layers without a cache
_FAR = 1 << 30  # a position farther than any window reaches
_LAST_RUN_POSITION = 1 << 17  # the largest position run: larger RoPE tables may take long
_NOT_CAUSAL = 1 << 40  # code of a mask that hides a row itself or shows a later row


class AttentionCall(NamedTuple):
    """A layer's call of the probe."""

    layer: int
    module: torch.nn.Module
    shape: LayerShape
    pattern: Pattern


CALLS: ContextVar[list[AttentionCall]] = ContextVar("probed_calls")


def probe_batch(lasts: Sequence[int], context: int = 0, switch: int | None = None) -> Batch:
    """A batch with a sequence of the tokens 1, 2 for each of ``lasts``, the position of its second
    token; blocks have two tokens. With ``context`` 1 only the second tokens are in the batch. From
    position ``switch`` on a sequence uses the long RoPE factors."""
    new, copies = 2 - context, len(lasts)
    ids = [1, 2][context:] * copies
    positions = [last - 1 + index for last in lasts for index in range(context, 2)]
    slots = [2 * number + index for number in range(copies) for index in range(context, 2)]
    long = [switch is not None and last >= switch for last in lasts]
    spans = tuple(Span(i, i * new, context, new, long=long[i]) for i in range(copies))
    return Batch(ids, positions, slots, spans, tuple((i,) for i in range(copies)))


@torch.inference_mode()
def probe(reference: TorchBackend, layers: int) -> tuple[int, list[list[StatePart]]]:
    """Set the cache shapes, patterns and names of all ``layers`` in ``reference``. Returns the
    logits' width, and by layer the shapes and dtypes of a recurrent state. Raises
    UnsupportedModelError for layers that cannot be paged."""
    register()
    hf, calls = reference.hf, list[AttentionCall]()
    hf.set_attn_implementation(PROBE)
    try:
        batch = DeviceBatch.of(probe_batch((1,)), Staging(hf.device))
        with bound(CALLS, calls):
            logits = reference.run(batch)
    finally:
        hf.set_attn_implementation(ATTENTION)
    calls.sort(key=lambda call: call.layer)
    by_layer = {call.layer: call for call in calls}
    states = adapt_mixers(hf, layers)
    types = getattr(hf.config.get_text_config(decoder=True), "layer_types", None) or []
    no_attention = {n for n, parts in enumerate(states) if parts}
    no_attention |= {n for n, name in enumerate(types) if name in STATELESS}
    complete = by_layer.keys() | no_attention == {*range(layers)}
    if not calls or not complete or len(calls) > len(by_layer):
        missing = sorted({*range(layers)} - by_layer.keys() - no_attention)
        what = f"layers {missing} of {layers} did not go through"
        if not missing:
            what = "some layers went more than once through"
        raise UnsupportedModelError(
            f"{type(hf).__name__}: {what} the attention interface of transformers, so their state "
            "cannot be paged; use another architecture"
        )
    patterns = (by_layer[n].pattern if n in by_layer else FULL for n in range(layers))
    reference.shapes = [by_layer[n].shape if n in by_layer else (0, 0, 0) for n in range(layers)]
    unique = {FULL: FULL}  # AttentionStep needs equal patterns to be one object
    reference.patterns = tuple(unique.setdefault(pattern, pattern) for pattern in patterns)
    _refuse_stateful_positions(hf, reference.patterns)
    reference.name_layers([call.module for call in calls])
    return logits.shape[-1], states


@torch.inference_mode()
def verify(model: Any) -> None:
    """Check that two equal sequences in a batch with a third, and a step on the cache, give equal
    logits. They do not if a layer keeps state outside keys and values, or a recurrent layer gives a
    chunk another result than its rows one by one. ``model``: a CausalModel. Raises
    UnsupportedModelError."""
    cache = model.new_cache(3, 2)
    far = min(model.max_positions, _LAST_RUN_POSITION) - 1
    batch = probe_batch((1, 1, far), switch=model.rope_switch)
    if cache.states is not None:  # make the second token a draft, so that the state before it stays
        drafted = replace(batch.spans[0], pending=1, parents=(-1,))
        batch = replace(batch, spans=(drafted, *batch.spans[1:]))
    first, second, _ = model(batch, cache).logits.chunk(3)
    cached = model(probe_batch((1,), context=1), cache).logits
    # With quantised activations a small rounding difference may move a value to the next code.
    limit = 1e-2 if model.dtype == torch.float32 and not is_quantised(model.hf) else 0.25
    for other in (second[-1:], cached):
        if not relative_error(other, first[-1:]) <= limit:
            raise UnsupportedModelError(
                f"{type(model.hf).__name__}: a layer keeps state outside its keys and values "
                "(recurrent, convolutional, position-blind or shared by all sequences of a "
                "batch), which cannot be rolled back; use another architecture"
            )


@lru_cache(maxsize=1)
def register() -> None:
    """Register both attention functions with transformers, once per process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, _attention)
    AttentionInterface.register(PROBE, _probing_attention)
    AttentionMaskInterface.register(PROBE, _probing_mask)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    scaling = options.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    step, softcap, sinks = STEP.get(), options.get("softcap"), options.get("s_aux")
    out = paged_attention(query, key, value, module.layer_idx, step, scaling, softcap, sinks)
    return out, None


def _probing_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    kind = type(module).__name__
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError(
            f"{kind} does not know which layer it is in (no layer_idx); use another architecture"
        )
    for name in ("position_bias", "head_mask", "block_mask", "indexer"):
        if options.get(name) is not None:
            raise UnsupportedModelError(
                f"{kind} gives attention a {name}, which is not supported; use another architecture"
            )
    if attention_mask is not None and attention_mask.dtype != torch.int64:
        raise UnsupportedModelError(
            f"{kind} makes the attention mask from the text itself, which is not supported; "
            "use another architecture"
        )
    shape = key.shape[1], key.shape[-1], value.shape[-1]
    pattern = _pattern(attention_mask, options.get("sliding_window"))
    CALLS.get().append(AttentionCall(layer, module, shape, pattern))
    group = query.shape[1] // value.shape[1]
    return value.repeat_interleave(group, 1).transpose(1, 2).contiguous(), None


def _pattern(mask: Tensor | None, window: int | None) -> Pattern:
    if mask is None:  # the model builds no masks through transformers' functions
        return Pattern(window=window)
    code = int(mask.flatten()[0].item())
    if code == _NOT_CAUSAL:
        raise UnsupportedModelError(
            "attention is bidirectional, so it is no model to decode with; use a causal one"
        )
    if code == 0:
        return FULL
    return Pattern(window=code) if code > 0 else Pattern(chunk=-code)


def _probing_mask(
    mask_function: Callable[..., Any], device: Any = "cpu", config: Any = None, **sizes: Any
) -> Tensor:
    """A mask for the probe: every entry is W for a window, -C for chunks, 0 for full attention."""
    code = _code(mask_function, getattr(config, "attention_chunk_size", None))
    shape = sizes["batch_size"], 1, sizes["q_length"], sizes["kv_length"]
    return torch.full(shape, code, device=device)


def _code(mask_function: Callable[..., Any], chunk: int | None) -> int:
    """Find out a mask's code by asking transformers' ``mask_function`` about single positions."""

    def sees(query: int, key: int) -> bool:
        index = [torch.tensor(value) for value in (0, 0, query, key)]
        return bool(mask_function(*index))

    def first(query: int) -> int:
        """The first key that a query sees, by bisection."""
        low, high = 0, query
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sees(query, middle) else (middle + 1, high)
        return low

    try:
        not_causal = sees(_FAR, _FAR + 1) or not sees(_FAR, _FAR)
    except IndexError:
        raise UnsupportedModelError(
            "a layer's attention mask is a table of the tokens, images among them, which is not "
            "supported; use the model's text-only checkpoint"
        ) from None
    if not_causal:  # an error only if a layer uses it: Qwen2 MoE makes an unused mask of window 0
        return _NOT_CAUSAL
    if sees(_FAR, 0):
        return 0
    windows = [query - first(query) + 1 for query in (_FAR, _FAR + 1, _FAR + 2)]
    if len(set(windows)) == 1:
        return windows[0]
    if chunk and all(first(query) == query // chunk * chunk for query in (_FAR, _FAR + chunk + 1)):
        return -chunk
    raise UnsupportedModelError(
        "a layer's attention mask is neither full, a window nor chunks; use another architecture"
    )


def _refuse_stateful_positions(hf: Any, patterns: Sequence[Pattern]) -> None:
    """Raises UnsupportedModelError for positions counted from the padding token (RoBERTa), and for
    windows that only transformers' cache applies (Moshi): a forward of two tokens shows neither."""
    kind = type(hf).__name__
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in hf.modules()):
        raise UnsupportedModelError(
            f"{kind} numbers positions from its padding token on, which is not supported; "
            "use a decoder-only language model"
        )
    config = hf.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    windowed = getattr(config, "sliding_window", None) is not None
    for layer, pattern in enumerate(patterns):
        has_window = types[layer] == "sliding_attention" if types else windowed
        if has_window and pattern == FULL:
            raise UnsupportedModelError(
                f"{kind}: the attention of layer {layer} has no window, but its cache in "
                "transformers has, so what is right depends on the forwards; use another model"
            )

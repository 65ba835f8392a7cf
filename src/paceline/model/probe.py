"""What a loaded model does in attention, recorded in a forward of two tokens.

Two attention functions are registered with transformers: the real one, for which it builds no
masks, and a probe. The numbers in the probe's masks are a layer's window or chunk, so these are not
guessed from the configuration, and layers that call neither function are noticed.
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

ATTENTION = "paceline"
PROBE = "paceline_probe"
STATELESS = {"mlp", "moe", "dummy"}  # kinds of layers without a cache
_FAR = 1 << 30  # a position beyond every window
_FARTHEST = 1 << 17  # the last position that is run: rotary tables for more may take long
_BOTH_WAYS = 1 << 40  # the code of a mask that hides a row's past or shows what follows it


class AttentionCall(NamedTuple):
    """A layer's call of the probing attention function."""

    layer: int
    module: torch.nn.Module
    shape: LayerShape
    pattern: Pattern


CALLS: ContextVar[list[AttentionCall]] = ContextVar("probed_calls")


def probe_batch(lasts: Sequence[int], context: int = 0, switch: int | None = None) -> Batch:
    """A sequence of the tokens 1, 2 for each of ``lasts``, its last position, in a block of two;
    with context 1 only the second tokens. From position ``switch`` on they are long."""
    new, copies = 2 - context, len(lasts)
    ids = [1, 2][context:] * copies
    positions = [last - 1 + index for last in lasts for index in range(context, 2)]
    slots = [2 * number + index for number in range(copies) for index in range(context, 2)]
    long = [switch is not None and last >= switch for last in lasts]
    spans = tuple(Span(i, i * new, context, new, long=long[i]) for i in range(copies))
    return Batch(ids, positions, slots, spans, tuple((i,) for i in range(copies)))


@torch.inference_mode()
def probe(reference: TorchBackend, layers: int) -> tuple[int, list[list[StatePart]]]:
    """Find shapes, patterns and names of all ``layers``, which ``reference`` then has; returns the
    number of logits, and by layer the parts of a recurrent layer's state. Raises
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
    made = {call.layer: call for call in calls}
    states = adapt_mixers(hf, layers)
    types = getattr(hf.config.get_text_config(decoder=True), "layer_types", None) or []
    without = {n for n, parts in enumerate(states) if parts}
    without |= {n for n, name in enumerate(types) if name in STATELESS}
    if not calls or made.keys() | without != {*range(layers)} or len(calls) > len(made):
        missing = sorted({*range(layers)} - made.keys() - without)
        what = f"layers {missing} of {layers} did not go through"
        if not missing:
            what = "some layers went more than once through"
        raise UnsupportedModelError(
            f"{type(hf).__name__}: {what} the attention interface of transformers, so their state "
            "cannot be paged; use another architecture"
        )
    known = {FULL: FULL}  # equal ones are one object, see AttentionStep
    patterns = (made[n].pattern if n in made else FULL for n in range(layers))
    reference.shapes = [made[n].shape if n in made else (0, 0, 0) for n in range(layers)]
    reference.patterns = tuple(known.setdefault(it, it) for it in patterns)
    _refuse_stateful_positions(hf, reference.patterns)
    reference.name_layers([call.module for call in calls])
    return logits.shape[-1], states


@torch.inference_mode()
def verify(model: Any, exact: bool) -> None:
    """Two equal sequences beside a third, then a cached step, must give equal logits: they do not
    with state outside keys and values, or a recurrent layer that reads a chunk unlike its rows.
    ``model``: a CausalModel; ``exact``: in float32. Raises UnsupportedModelError."""
    cache = model.new_cache(3, 2)
    far = min(model.max_positions, _FARTHEST) - 1
    batch = probe_batch((1, 1, far), switch=model.rope_switch)
    if cache.states is not None:  # the second token as a draft, which leaves a state before it
        drafted = replace(batch.spans[0], pending=1, parents=(-1,))
        batch = replace(batch, spans=(drafted, *batch.spans[1:]))
    first, second, _ = model(batch, cache).logits.chunk(3)
    cached = model(probe_batch((1,), context=1), cache).logits
    # Rounding may change a code of quantised activations.
    limit = 1e-2 if exact else 0.25
    for other in (second[-1:], cached):
        if not relative_error(other, first[-1:]) <= limit:
            raise UnsupportedModelError(
                f"{type(model.hf).__name__}: a layer keeps state outside its keys and values "
                "(recurrent, convolutional, position-blind or shared by all sequences of a "
                "batch), which cannot be rolled back; use another architecture"
            )


@lru_cache(maxsize=1)
def register() -> None:
    """Register both functions with transformers, once per process."""
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
    if code == _BOTH_WAYS:
        raise UnsupportedModelError(
            "attention is bidirectional, so it is no model to decode with; use a causal one"
        )
    if code == 0:
        return FULL
    return Pattern(window=code) if code > 0 else Pattern(chunk=-code)


def _probing_mask(
    mask_function: Callable[..., Any], device: Any = "cpu", config: Any = None, **sizes: Any
) -> Tensor:
    """An int64 mask whose every entry is W for a window, -C for chunks, 0 for no limit."""
    code = _code(mask_function, getattr(config, "attention_chunk_size", None))
    shape = sizes["batch_size"], 1, sizes["q_length"], sizes["kv_length"]
    return torch.full(shape, code, device=device)


def _code(mask_function: Callable[..., Any], chunk: int | None) -> int:
    def sees(query: int, key: int) -> bool:
        index = [torch.tensor(value) for value in (0, 0, query, key)]
        return bool(mask_function(*index))

    def first(query: int) -> int:
        low, high = 0, query
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sees(query, middle) else (middle + 1, high)
        return low

    try:
        other = sees(_FAR, _FAR + 1) or not sees(_FAR, _FAR)
    except IndexError:
        raise UnsupportedModelError(
            "a layer's attention mask is a table of the tokens, images among them, which is not "
            "supported; use the model's text-only checkpoint"
        ) from None
    if other:  # an error only if a layer uses it; Qwen2 MoE makes a mask of window 0 that none does
        return _BOTH_WAYS
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
    """Raises UnsupportedModelError for positions numbered from the padding token on (RoBERTa) and
    windows of the cache alone (Moshi), which no forward of two tokens shows."""
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
        cut = types[layer] == "sliding_attention" if types else windowed
        if cut and pattern == FULL:
            raise UnsupportedModelError(
                f"{kind}: the attention of layer {layer} has no window, but its cache in "
                "transformers has, so what is right depends on the forwards; use another model"
            )

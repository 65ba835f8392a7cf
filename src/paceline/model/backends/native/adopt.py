"""Giving a loaded model to the kernels, if they know it and agree with the reference about it."""

from __future__ import annotations

import statistics
from typing import Any, Protocol

import torch

from paceline.core.batch import Batch, ModelOutput, Span
from paceline.model.backends.base import Backend
from paceline.model.backends.native.compile import NativeUnavailableError, is_off
from paceline.model.backends.native.library import library
from paceline.model.backends.native.model import NativeModel, unpack_modules
from paceline.model.backends.native.packing import PackedLinear
from paceline.model.backends.native.recognise import describe
from paceline.model.backends.reference.recognise import relative_error
from paceline.model.paged.cache import LayerShape, PagedCache
from paceline.model.paged.masks import Pattern
from paceline.stages import warn

_ROWS = 16


class Adoptable(Protocol):
    """A model as ``CausalModel`` adapts it: what adopting asks of it and sets in it."""

    hf: Any
    name: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    cache_shapes: list[LayerShape]
    patterns: tuple[Pattern, ...]
    native: Backend | None
    refused: str | None

    def __call__(self, batch: Batch, cache: PagedCache) -> ModelOutput: ...


@torch.inference_mode()
def adopt(model: Adoptable) -> bool:
    """Run the model's forwards natively from now on, if that can be; says why where it cannot.

    To be asked before anything else lays out the weights.
    """
    model.refused = _refusal(model)
    if model.refused is not None and not is_off():
        warn(f"{model.name} runs on the reference backend: {model.refused}")
    return model.refused is None


def _refusal(model: Adoptable) -> str | None:
    """Adopt the model, or say in a few words why not."""
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    found = describe(model.hf, model.cache_shapes, model.patterns)
    if isinstance(found, str):
        return found
    batch = _probe_batch(model)
    wanted = _logits(model, batch)
    model.native = NativeModel(model.hf, found)
    apart = _difference(_logits(model, batch), wanted)
    # A model of which the description misses something is wrong by far more than rounding.
    if apart < _limit(model):
        return None
    model.native = None
    unpack_modules(model.hf)
    return f"the kernels' logits are {apart:.0%} off"


def _limit(model: Adoptable) -> float:
    """How far apart logits may be. What bf16 rounds otherwise may turn a whole code of quantised
    activations, in every layer."""
    exact = model.dtype == torch.float32
    quantised = any(isinstance(m, PackedLinear) and m.packed.form for m in model.hf.modules())
    return (1e-2 if exact else 0.4) if quantised else (1e-3 if exact else 0.25)


def _difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The median row's. Of SmolLM2's in bf16 the reference's are 2 to 72 % from those in float32
    with the same weights, most 4 %; the kernels', which round less often, 1 to 6 %."""
    rows = [relative_error(a, b) for a, b in zip(got, wanted, strict=True)]
    return statistics.median(rows)


def _logits(model: Adoptable, batch: Batch) -> torch.Tensor:
    cache = PagedCache(model.cache_shapes, 1, _ROWS, model.dtype, model.device)
    return model(batch, cache).logits


def _probe_batch(model: Adoptable) -> Batch:
    rows = torch.arange(_ROWS, device=model.device)
    ids = (rows * 7919 + 1) % model.vocab_size
    return Batch(ids, rows, rows, (Span(0, 0, 0, _ROWS),), ((0,),))

"""Giving a loaded model to the kernels, if they know it and agree with the reference about it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.kernels.compile import NativeUnavailableError, is_off
from paceline.kernels.library import library
from paceline.model.backends.base import Backend
from paceline.model.backends.native.model import NativeModel, unpack_modules
from paceline.model.backends.native.packing import PackedLinear
from paceline.model.backends.native.recognise import describe
from paceline.model.backends.reference.recognise import relative_error
from paceline.model.backends.trial import Tried, trial_logits
from paceline.model.paged.masks import Pattern
from paceline.stages import warn


class Usable(Tried, Protocol):
    """A model as ``CausalModel`` adapts it: what using asks of it and sets in it."""

    name: str
    patterns: tuple[Pattern, ...]
    native: Backend | None
    refused: str | None


@torch.inference_mode()
def use_kernels(model: Usable) -> bool:
    """Run the model's forwards natively from now on, if that can be; says why where it cannot.

    To be asked before anything else lays out the weights.
    """
    model.refused = _refusal(model)
    if model.refused is not None and not is_off():
        warn(f"{model.name} runs on the reference backend: {model.refused}")
    return model.refused is None


def _refusal(model: Usable) -> str | None:
    """Run the model by the kernels, or say in a few words why not."""
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    found = describe(model.hf, model.cache_shapes, model.patterns)
    if isinstance(found, str):
        return found
    wanted = trial_logits(model)
    model.native = NativeModel(model.hf, found)
    apart = _difference(trial_logits(model), wanted)
    # A model of which the description misses something is wrong by far more than rounding.
    if apart < _limit(model):
        return None
    model.native = None
    unpack_modules(model.hf)
    return f"the kernels' logits are {apart:.0%} off"


def _limit(model: Usable) -> float:
    """How far apart logits may be. What is rounded otherwise may turn a whole code of quantised
    activations, and that all that follows: of 8 bits, in bf16 and in float32 (SmolLM2 in 4 bits: by
    4 %); of 16 bits, in bf16."""
    exact = model.dtype == torch.float32
    packed = [m.packed for m in model.hf.modules() if isinstance(m, PackedLinear)]
    forms = [one.form for one in packed if one.form is not None]
    if not forms:
        return 1e-3 if exact else 0.25
    return 1e-2 if exact and all(form.wide for form in forms) else 0.4


def _difference(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Of the sequence that is furthest off the median row's. Of SmolLM2's in bf16 the reference's
    rows are 2 to 72 % from those in float32 with the same weights, most 4 %; the kernels', which
    round less often, 1 to 6 %."""
    return max(
        statistics.median(map(relative_error, ours, theirs))
        for ours, theirs in zip(got, wanted, strict=True)
    )

"""Giving a loaded model to the kernels, if they know it and agree with the reference about it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from paceline.kernels.compile import NativeUnavailableError
from paceline.kernels.library import library
from paceline.model.backends.base import Adapted, Backend
from paceline.model.backends.native.model import NativeModel, unpack_modules
from paceline.model.backends.native.packing import PackedLinear
from paceline.model.backends.native.recognise import describe
from paceline.model.backends.trial import relative_error, trial_logits


@torch.inference_mode()
def native_backend(model: Adapted) -> Backend | str:
    """The kernels with the model's weights, or in a few words why they do not run it.

    To be asked before anything else lays out the weights.
    """
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    shape = describe(model.hf, model.cache_shapes, model.patterns)
    if isinstance(shape, str):
        return shape
    wanted = trial_logits(model)
    native = NativeModel(model.hf, shape)
    difference = _difference(trial_logits(model, native), wanted)
    # A model of which the description misses something is wrong by far more than rounding.
    if difference < _limit(model):
        return native
    unpack_modules(model.hf)
    return f"the kernels' logits are {difference:.0%} off"


def _limit(model: Adapted) -> float:
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

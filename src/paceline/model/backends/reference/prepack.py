"""Making a loaded model quick from outside: one pass over its modules, nothing in them rewritten.

Two levels, each kept only where it gains and where results agree:

1. any model: linear modules get prepacked weights (bf16 on CPU), projections of one input are
   merged into one product, modules that compute an RMS norm get a short forward;
2. Llama-shaped models: the whole forward becomes the loop of ``lean.py`` over the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

import torch
from torch import nn

from paceline.core.memory import trim
from paceline.model.backends.fields import unknown_field
from paceline.model.backends.reference.lean import LeanModel
from paceline.model.backends.reference.norms import optimise_norms
from paceline.model.backends.reference.products import (
    MergedLinear,
    MergedPart,
    PrepackedLinear,
    can_prepack,
    mergeable,
)
from paceline.model.backends.reference.recognise import is_llama_shaped, lean_model, relative_error
from paceline.model.backends.trial import Tried, trial_logits


class Adapted(Tried, Protocol):
    """A model as ``CausalModel`` adapts it: what making it quick asks of it and sets in it."""

    lean: LeanModel | None


AnyModel = TypeVar("AnyModel", bound=Adapted)

_TRIM_BYTES = 64 << 20

# Siblings that transformers feeds the same tensor. If some model does not, the parts are still
# right: a MergedLinear looks at which tensor it is given.
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def prepack_modules(hf: nn.Module) -> int:
    """Level 1, in place; returns how many linear modules were replaced (0 the second time).

    Each plain weight is freed as soon as it is prepacked, so at no time are two copies of more than
    one weight in memory. Where an embedding shares its weight with a linear module, the
    embedding keeps it and the linear gets a prepacked copy.
    """
    count = held = 0
    # Parents only: a list of all modules would keep every plain weight alive to the end.
    for parent in [m for m in hf.modules() if next(m.children(), None) is not None]:
        done = [*_merge_children(parent), *_prepack_children(parent)]
        count += len(done)
        held += sum(done)
        if held > _TRIM_BYTES:
            trim()
            held = 0
    if count:
        trim()
        optimise_norms(hf)
    return count


def _merge_children(parent: nn.Module) -> Iterator[int]:
    """Merge the projections of one input; yields the bytes of each."""
    for names in _MERGED:
        linears = [getattr(parent, name, None) for name in names]
        if mergeable(linears) and can_prepack(linears[0].weight):
            merged = MergedLinear(linears)
            for index, name in enumerate(names):
                yield linears[index].weight.nbytes
                setattr(parent, name, MergedPart(merged, index))


def _prepack_children(parent: nn.Module) -> Iterator[int]:
    """Replace the plain linear children by prepacked ones; yields the bytes of each."""
    from transformers.pytorch_utils import Conv1D

    for name, child in list(parent.named_children()):
        weight = child.weight if isinstance(child, nn.Linear | Conv1D) else None
        if weight is None or not can_prepack(weight):
            continue
        if type(child) is nn.Linear:
            setattr(parent, name, PrepackedLinear(weight, child.bias))
            yield weight.nbytes
        elif isinstance(child, Conv1D):  # its weight is [in, out]
            setattr(parent, name, PrepackedLinear(weight.t(), child.bias))
            yield weight.nbytes


@torch.inference_mode()
def optimise(model: AnyModel) -> AnyModel:
    """Make a loaded model quick, in place; returns the same model. A second call does nothing.

    If the lean forward's logits differ from the module's by more than rounding, the module's
    stay in use: a slow model is better than a wrong one.
    """
    if model.lean is not None:
        return model
    llama = is_llama_shaped(model.hf) and unknown_field(model.hf) is None
    wanted = trial_logits(model) if llama else None
    prepack_modules(model.hf)
    if wanted is not None:
        lean = lean_model(model.hf)
        model.lean = lean
        limit = 1e-3 if model.dtype == torch.float32 else 0.1
        if lean is not None:
            pairs = zip(trial_logits(model), wanted, strict=True)
            if not all(relative_error(ours, theirs) < limit for ours, theirs in pairs):
                model.lean = None
    return model

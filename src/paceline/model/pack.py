"""Making a loaded model quick from outside: one pass over its modules, nothing in them rewritten.

Two levels, each kept only where it gains and where results agree:

1. any model: linear modules get packed weights (bf16 on CPU), projections of one input are
   merged into one product, modules that compute an RMS norm get a short forward;
2. Llama-shaped models: the whole forward becomes the loop of ``lean.py`` over the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from paceline.core.batch import Batch, Span
from paceline.model.cache import PagedCache
from paceline.model.norms import quicken_norms
from paceline.model.packed import (
    MergedLinear,
    MergedPart,
    PackedLinear,
    can_pack,
    mergeable,
)
from paceline.model.recognise import is_llama_shaped, lean_model, relative_error
from paceline.model.target import CausalModel

_PROBE_ROWS = 16

# Siblings that transformers feeds the same tensor. If some model does not, the parts are still
# right: a MergedLinear looks at which tensor it is given.
_MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def pack_modules(hf: nn.Module) -> int:
    """Level 1, in place; returns how many linear modules were replaced (0 the second time).

    Each plain weight is freed as soon as it is packed, so at no time are two copies of more than
    one weight in memory. Where an embedding shares its weight with a linear module, the
    embedding keeps it and the linear gets a packed copy.
    """
    count = 0
    for parent in list(hf.modules()):
        for names in _MERGED:
            linears = [getattr(parent, name, None) for name in names]
            if mergeable(linears) and can_pack(linears[0].weight):
                merged = MergedLinear(linears)
                for index, name in enumerate(names):
                    setattr(parent, name, MergedPart(merged, index))
                count += len(names)
        for name, child in _packable(parent):
            setattr(parent, name, child)
            count += 1
    if count:
        quicken_norms(hf)
    return count


def _packable(parent: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Packed stand-ins for the plain linear children of a module."""
    from transformers.pytorch_utils import Conv1D

    for name, child in list(parent.named_children()):
        if type(child) is nn.Linear and can_pack(child.weight):
            yield name, PackedLinear(child.weight, child.bias)
        elif isinstance(child, Conv1D) and can_pack(child.weight):
            yield name, PackedLinear(child.weight.t(), child.bias)  # its weight is [in, out]


@torch.inference_mode()
def pack(model: CausalModel) -> CausalModel:
    """Make a loaded model quick, in place; returns the same model. A second call does nothing.

    If the lean forward's logits differ from the module's by more than rounding, the module's
    stay in use: a slow model is better than a wrong one.
    """
    if model.lean is not None:
        return model
    llama = is_llama_shaped(model.hf)
    cache = PagedCache(model.cache_shapes, 1, _PROBE_ROWS, model.dtype, model.device)
    batch = _probe_batch(model)
    wanted = model(batch, cache).logits if llama else None
    pack_modules(model.hf)
    if wanted is not None:
        lean = lean_model(model.hf)
        model.lean = lean
        limit = 1e-3 if model.dtype == torch.float32 else 0.1
        if lean is not None and not relative_error(model(batch, cache).logits, wanted) < limit:
            model.lean = None
    return model


def _probe_batch(model: CausalModel) -> Batch:
    rows = torch.arange(_PROBE_ROWS, device=model.device)
    ids = (rows * 7919 + 1) % model.vocab_size
    return Batch(ids, rows, rows, (Span(0, 0, 0, _PROBE_ROWS),), ([0],))

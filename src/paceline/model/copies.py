"""A loaded model's own form in 8 or 4 bits, beside it: new are the rounded matrices alone.

    the model   embedding  norms  rotary tables | matrices as they were loaded
    its copy          (the very same)             | matrices in 8 or 4 bits

Layers keep their numbers and their shapes, so the copy reads keys and values that the model wrote,
in the model's own cache.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.model.offload import brought, settle
from paceline.model.precision import is_quantised, quantise_loaded
from paceline.model.quantised.convert import children, copy_beside
from paceline.model.quantised.weights import HeldLinear, is_plain, plain_linear
from paceline.model.target import CausalModel

_COPIES: WeakKeyDictionary[CausalModel, dict[str, CausalModel]] = WeakKeyDictionary()


class _Original(nn.Linear):
    """A linear layer of another model, whose weight is made when it is asked for: whatever the
    layout of a loaded model is, and wherever it stays, no second copy of it is held while it is
    rounded."""

    def __init__(self, source: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self._sources = (source,)  # in a tuple, so that it is no submodule

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        dense: torch.Tensor = self._own("weight")
        return dense.detach()

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        bias: torch.Tensor | None = self._own("bias")
        return None if bias is None else bias.detach()

    def _own(self, name: str) -> Any:
        source = self._sources[0]
        return brought(source, name) if isinstance(source, nn.Linear) else getattr(source, name)

    def plain(self) -> nn.Module:
        """The layer itself if it is a plain one, else one of the same numbers."""
        source: nn.Module = self._sources[0]
        if isinstance(source, nn.Linear) and not hasattr(source, "_hf_hook"):
            return source
        return plain_linear(self.weight, self.bias)


def quantised_copy(model: CausalModel, precision: str) -> CausalModel:
    """``model`` in "int8" or "int4", on the backend that was asked for with it.

    It stays with the model. Raises ConfigError where that cannot be: not on a CPU, or no matrix
    that divides into groups.
    """
    known = _COPIES.setdefault(model, {})
    if precision not in known:
        known[precision] = _by_backend(model, precision) or _rounded(model, precision)
    return known[precision]


def forget_copy(model: CausalModel, precision: str) -> None:
    """Let go of the form made by ``quantised_copy``."""
    _COPIES.get(model, {}).pop(precision, None)


def _by_backend(model: CausalModel, precision: str) -> CausalModel | None:
    made = model.backend.quantised(model, precision)
    if made is None:
        return None
    copied = copy.copy(model)
    copied.name = f"{model.name} in {precision}"
    copied.hf, copied.backend = made
    copied.reference = model.reference.on(copied.hf)
    return copied


def _rounded(model: CausalModel, precision: str) -> CausalModel:
    """Of modules as the library has them."""
    name = f"{model.name} in {precision}"
    hf = quantise_loaded(name, copy_beside(model.hf, _stand_in, settle), precision)
    if not is_quantised(hf):
        raise ConfigError(
            f"no matrix of {model.name} divides into groups of 32 inputs, so there is no "
            f"{precision} form of it; use another drafter"
        )
    for parent, key, child in children(hf):
        if isinstance(child, _Original):  # left as it was, for its shape
            setattr(parent, key, child.plain())
    copied = CausalModel(hf, name)
    copied.asked = model.asked
    return copied.optimised()


def _stand_in(module: Any) -> _Original | None:
    """For a matrix of plain numbers in any layout, or one of our quantised ones; libraries' own
    layers are linear ones whose weight holds codes."""
    plain = isinstance(module, nn.Linear) and is_plain(module.weight)
    return _Original(module) if plain or isinstance(module, HeldLinear) else None

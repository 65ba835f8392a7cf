"""A loaded model's own form in 8 or 4 bits, beside it: new are the rounded matrices alone.

    the model   embedding  norms  rotary tables | matrices as they were loaded
    its twin        (the very same)             | matrices in 8 or 4 bits

Layers keep their numbers and their shapes, so the twin reads keys and values that the model wrote,
in the model's own cache.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.model.backends.native.packing import PackedLinear
from paceline.model.backends.reference.norms import slow_norm
from paceline.model.backends.reference.products import MergedPart, PrepackedLinear, is_plain
from paceline.model.precision import is_quantised, quantise_loaded
from paceline.model.quantised.weights import QuantisedLinear, plain_linear
from paceline.model.target import CausalModel

_TWINS: WeakKeyDictionary[CausalModel, dict[str, CausalModel]] = WeakKeyDictionary()


class _Original(nn.Linear):
    """A linear layer of another model, whose weight is made when it is asked for: whatever the
    layout of a loaded model is, no second copy of it is held while it is rounded."""

    def __init__(self, source: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self._sources = (source,)  # in a tuple, so that it is no submodule

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        dense: torch.Tensor = self._sources[0].weight
        return dense.detach()

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        bias: torch.Tensor | None = self._sources[0].bias
        return None if bias is None else bias.detach()

    def plain(self) -> nn.Module:
        """The layer itself if it is a plain one, else one of the same numbers."""
        source: nn.Module = self._sources[0]
        return source if isinstance(source, nn.Linear) else plain_linear(self.weight, self.bias)


def quantised_twin(model: CausalModel, precision: str) -> CausalModel:
    """``model`` in "int8" or "int4", on the backend that was asked for with it.

    It stays with the model: rounding takes longer than loading does.
    Raises ConfigError where that cannot be: not on a CPU, or no matrix that divides into groups.
    """
    known = _TWINS.setdefault(model, {})
    if precision not in known:
        known[precision] = _rounded(model, precision)
    return known[precision]


def _rounded(model: CausalModel, precision: str) -> CausalModel:
    name = f"{model.name} in {precision}"
    hf = quantise_loaded(name, _beside(model.hf), precision)
    if not is_quantised(hf):
        raise ConfigError(
            f"no matrix of {model.name} divides into groups of 32 inputs, so there is no "
            f"{precision} form of it; use another drafter"
        )
    for parent, key, child in _children(hf):
        if isinstance(child, _Original):  # left as it was, for its shape
            setattr(parent, key, child.plain())
    twin = CausalModel(hf, name)
    twin.asked = model.asked
    return twin.quickened()


def _beside(module: Any) -> Any:
    """A copy with the very same parameters, whose linear layers stand for those of ``module``."""
    if _is_linear(module):
        return _Original(module)
    twin = copy.copy(module)
    # Tables of its own: parameters, hooks and children are looked up in them.
    vars(twin).update({key: copy.copy(v) for key, v in vars(module).items() if isinstance(v, dict)})
    twin._modules = {name: _beside(child) for name, child in module._modules.items()}
    slow_norm(twin)
    return twin


def _is_linear(module: Any) -> bool:
    """A matrix of plain numbers in any layout, or one of our quantised ones."""
    if isinstance(module, (PackedLinear, PrepackedLinear, MergedPart, QuantisedLinear)):
        return True
    # Libraries' own layers are linear ones whose weight holds codes.
    return isinstance(module, nn.Linear) and is_plain(module.weight)


def _children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(module.modules()):
        for key, child in list(parent.named_children()):
            yield parent, key, child

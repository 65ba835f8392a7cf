"""Copies of a loaded model that share its weights: with fewer layers, or with fewer bits.

Layer n keeps its number and shape, so it uses the keys and values of layer n in the model's cache.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.model.offload import make_resident
from paceline.model.quantised.convert import Scheme, copy_beside, quantise_module
from paceline.model.quantised.weights import ROW_GROUP, LinearBase, is_plain
from paceline.model.target import CausalModel

_COPIES: WeakKeyDictionary[CausalModel, dict[str, CausalModel]] = WeakKeyDictionary()


def layer_view(model: CausalModel, layers: Sequence[int]) -> CausalModel:
    """The model with only ``layers``, counted from 0, in order. Raises ConfigError for those that
    it does not have, UnsupportedModelError if a trial shows that layers cannot be left out."""
    kept = sorted(set(layers))
    if not kept or not 0 <= kept[0] <= kept[-1] < model.num_layers:
        raise ConfigError(
            f"{model.name} has layers 0 to {model.num_layers - 1}; a part of it cannot be {kept}"
        )
    view = copy.copy(model)
    view.backend = model.backend.without(frozenset(range(model.num_layers)) - frozenset(kept))
    return view


def quantised_copy(model: CausalModel, precision: str) -> CausalModel:
    """``model`` in "int8" or "int4", on the backend that was asked for; cached with the model.
    Raises ConfigError off the CPU, or if no matrix divides into groups."""
    copies = _COPIES.setdefault(model, {})
    if precision not in copies:
        copies[precision] = _by_backend(model, precision) or _rounded(model, precision)
    return copies[precision]


def forget_copy(model: CausalModel, precision: str) -> None:
    """Drop the copy made by ``quantised_copy``."""
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
    """A copy of modules as the library has them; matrices are rounded one by one."""
    name = f"{model.name} in {precision}"
    if model.device.type != "cpu":
        raise ConfigError(
            f"{name}: weights are rounded on a CPU, not on {model.device}; use another drafter"
        )
    hf = copy_beside(model.hf, _to_be_rounded, make_resident)
    with stage(f"quantising {name}"):
        made = quantise_module(hf, Scheme(precision, head="int8", finer=True))
    if not made.layers:
        raise ConfigError(
            f"no matrix of {model.name} divides into groups of 32 inputs, so there is no "
            f"{precision} form of it; use another drafter"
        )
    copied = CausalModel(hf, name)
    copied.asked = model.asked
    return copied.optimised()


def _to_be_rounded(module: Any) -> Any | None:
    """The module if its matrix is plain or quantised by us; libraries' own layers hold codes."""
    plain = isinstance(module, nn.Linear) and is_plain(module.weight)
    divides = getattr(module, "in_features", 1) % ROW_GROUP == 0
    return module if divides and (plain or isinstance(module, LinearBase)) else None

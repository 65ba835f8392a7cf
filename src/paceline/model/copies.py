"""Copies of a loaded model that share its weights, with fewer layers or fewer bits: self-drafts.
Layer n keeps its index and shape, so it reads and writes layer n of the model's own cache."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.model.offload import make_resident
from paceline.model.quantised.convert import (
    Scheme,
    copy_sharing_parameters,
    quantise_module,
    split_experts,
)
from paceline.model.quantised.weights import ROW_GROUP, LinearBase, is_plain
from paceline.model.target import CausalModel

_COPIES: WeakKeyDictionary[CausalModel, dict[str, CausalModel]] = WeakKeyDictionary()


def layer_view(model: CausalModel, layers: Sequence[int]) -> CausalModel:
    """The model with only ``layers`` (indices from 0, in any order). Raises ConfigError for layers
    that do not exist, UnsupportedModelError if a trial shows that layers cannot be left out."""
    kept = sorted(set(layers))
    if not kept or not 0 <= kept[0] <= kept[-1] < model.num_layers:
        raise ConfigError(
            f"{model.name} has layers 0 to {model.num_layers - 1}; a part of it cannot be {kept}"
        )
    view = copy.copy(model)
    skipped = frozenset(range(model.num_layers)) - frozenset(kept)
    view.backend = model.backend.without_layers(skipped)
    return view


def quantised_copy(model: CausalModel, precision: str) -> CausalModel:
    """``model`` in "int8" or "int4", on the backend that was asked for; cached while the model
    lives. Raises ConfigError off the CPU, or if no matrix divides into groups."""
    copies = _COPIES.setdefault(model, {})
    if precision not in copies:
        copies[precision] = _backend_copy(model, precision) or _module_copy(model, precision)
    return copies[precision]


def _backend_copy(model: CausalModel, precision: str) -> CausalModel | None:
    """A copy that the backend quantises in its own layout; None if it does not."""
    quantised = model.backend.quantised(model, precision)
    if quantised is None:
        return None
    copied = copy.copy(model)
    copied.name = f"{model.name} in {precision}"
    copied.hf, copied.backend = quantised
    copied.reference = model.reference.on(copied.hf)
    return copied


def _module_copy(model: CausalModel, precision: str) -> CausalModel:
    """A copy of the modules of transformers, whose linear layers are quantised one by one."""
    name = f"{model.name} in {precision}"
    if model.device.type != "cpu":
        raise ConfigError(
            f"{name}: weights are rounded on a CPU, not on {model.device}; use another drafter"
        )
    hf = split_experts(copy_sharing_parameters(model.hf, _if_quantisable, make_resident))
    with stage(f"quantising {name}"):
        result = quantise_module(hf, Scheme(precision, head="int8", finer=True))
    if not result.layers:
        raise ConfigError(
            f"no matrix of {model.name} divides into groups of 32 inputs, so there is no "
            f"{precision} form of it; use another drafter"
        )
    copied = CausalModel(hf, name)
    copied.requested_backend = model.requested_backend
    return copied.use_requested_backend()


def _if_quantisable(module: Any) -> Any | None:
    """The module itself if it is a linear layer with plain weights or one of ours; None otherwise,
    also for quantised layers of other libraries."""
    plain = isinstance(module, nn.Linear) and is_plain(module.weight)
    divides = getattr(module, "in_features", 1) % ROW_GROUP == 0
    return module if divides and (plain or isinstance(module, LinearBase)) else None

"""A loaded model once more, at little or no cost of memory: with fewer layers, or in fewer bits.

    the model     embedding  norms  rotary tables | matrices as they were loaded
    fewer layers       (all the very same)        | (the very same)
    fewer bits         (all the very same)        | matrices in 8 or 4 bits

Layers keep their numbers and their shapes: layer n reads and writes keys and values of layer n in
the model's own cache, and no others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from paceline.core.batch import Batch, ModelOutput
from paceline.core.stages import stage
from paceline.errors import ConfigError
from paceline.model.offload import settle
from paceline.model.paged.segments import KeyValueStore
from paceline.model.quantised.convert import Scheme, copy_beside, quantise_module
from paceline.model.quantised.weights import ROW_GROUP, LinearBase, is_plain
from paceline.model.target import CausalModel

_COPIES: WeakKeyDictionary[CausalModel, dict[str, CausalModel]] = WeakKeyDictionary()


class LayerView:
    """Some layers of a model between its embedding and its final norm and head. ``layers``: the
    numbers of those that run, in order. Called like the model, on its own cache."""

    def __init__(self, model: CausalModel, layers: Sequence[int]) -> None:
        """``layers``: which to run, counted from 0. Raises ConfigError for layers that the model
        does not have, UnsupportedModelError if a trial shows that its layers cannot be left out one
        by one."""
        self.model = model
        self.layers = tuple(sorted(set(layers)))
        if not self.layers or not 0 <= self.layers[0] <= self.layers[-1] < model.num_layers:
            raise ConfigError(
                f"{model.name} has layers 0 to {model.num_layers - 1}; "
                f"a part of it cannot be {list(self.layers)}"
            )
        skipped = frozenset(range(model.num_layers)) - frozenset(self.layers)
        self.backend = model.backend.without(skipped)

    def __call__(self, batch: Batch, cache: KeyValueStore) -> ModelOutput:
        """One forward: ``logits`` of ``batch.logit_rows``, as CausalModel's."""
        return self.backend(batch, cache)


def quantised_copy(model: CausalModel, precision: str) -> CausalModel:
    """``model`` in "int8" or "int4", on the backend that was asked for with it. It stays with the
    model. Raises ConfigError where that cannot be: not on a CPU, or no matrix that divides into
    groups."""
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
    """Of modules as the library has them; no second copy of a matrix is held while it is rounded,
    whatever its layout and wherever it stays."""
    name = f"{model.name} in {precision}"
    if model.device.type != "cpu":
        raise ConfigError(
            f"{name}: weights are rounded on a CPU, not on {model.device}; use another drafter"
        )
    hf = copy_beside(model.hf, _shared, settle)
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


def _shared(module: Any) -> Any | None:
    """Matrices that are going to be rounded, plain numbers in any layout or quantised by us;
    libraries' own layers are linear ones whose weight holds codes."""
    plain = isinstance(module, nn.Linear) and is_plain(module.weight)
    divides = getattr(module, "in_features", 1) % ROW_GROUP == 0
    return module if divides and (plain or isinstance(module, LinearBase)) else None

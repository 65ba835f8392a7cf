"""A model with fewer layers that costs no memory: a view of a loaded one.

    embedding -> layer 0 -> (layer 1) -> layer 2 -> ... -> final norm -> head
                            left out

A view shares its model's weights, and its layers keep their numbers: layer n of the view reads and
writes the keys and values of layer n in the model's own paged cache, and no others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from paceline.core.batch import Batch, ModelOutput, Span
from paceline.errors import ConfigError, UnsupportedModelError
from paceline.model.backends.native.growth import NativeGrowth
from paceline.model.backends.native.model import NativeModel
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.pieces import KeyValueStore
from paceline.model.target import CausalModel


class LayerView:
    """Some layers of a model between its embedding and its final norm and head.

    ``layers``: the numbers of those that run, in order. Called like the model, on its own cache.
    """

    def __init__(self, model: CausalModel, layers: Sequence[int]) -> None:
        """``layers``: which to run, counted from 0.

        Raises ConfigError for layers that the model does not have, UnsupportedModelError if a
        trial shows that its layers cannot be left out one by one.
        """
        self.model = model
        whole = model.lean is None and model.native is None
        self._tuples = _tuple_layers(model) if whole else set[int]()
        self._choose(layers)
        if whole:
            self._check()

    def of(self, layers: Sequence[int]) -> LayerView:
        """Another view of the same model, without another trial."""
        other = copy.copy(self)
        other._choose(layers)
        return other

    def __call__(self, batch: Batch, cache: KeyValueStore) -> ModelOutput:
        """One forward: ``logits`` of ``batch.logit_rows``, as CausalModel's."""
        return self._short(batch, cache)

    @property
    def growth(self) -> NativeGrowth | None:
        """What grows whole drafts with these layers; None: nothing does."""
        native = self._short.native
        return native.growth if isinstance(native, NativeModel) else None

    @property
    def head_share(self) -> float:
        """Of the bytes of all matrices, the head's, as far as the kernels know."""
        native = self.model.native
        return native.head_share if isinstance(native, NativeModel) else 0.0

    def _choose(self, layers: Sequence[int]) -> None:
        model = self.model
        self.layers = tuple(sorted(set(layers)))
        if not self.layers or not 0 <= self.layers[0] <= self.layers[-1] < model.num_layers:
            raise ConfigError(
                f"{model.name} has layers 0 to {model.num_layers - 1}; "
                f"a part of it cannot be {list(self.layers)}"
            )
        skipped = frozenset(range(model.num_layers)) - frozenset(self.layers)
        self._short = copy.copy(model)
        if model.native is not None:
            self._short.native = model.native.without(skipped)
        elif model.lean is not None:
            self._short.lean = replace(model.lean, skipped=skipped)
        else:
            self._short.hf = _without(model, skipped, self._tuples)

    @torch.inference_mode()
    def _check(self) -> None:
        """Only the chosen layers may run: a patched ``forward`` may be bound to the original."""
        store = _Recording(_trial_cache(self.model))
        logits = self(_trial_batch(self.model), store).logits
        if tuple(store.layers) != self.layers or not logits.isfinite().all():
            raise UnsupportedModelError(
                f"{type(self.model.hf).__name__}: asked to run layers {list(self.layers)} it ran "
                f"{store.layers}; it cannot draft with a part of itself, use another drafter"
            )


class _Recording:
    """A cache that notes which layers ask for their keys and values."""

    def __init__(self, cache: PagedCache) -> None:
        self.block_size = cache.block_size
        self.layers: list[int] = []
        self._kv = cache.kv

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.layers.append(layer)
        return self._kv(layer)


def _trial_cache(model: CausalModel) -> PagedCache:
    return PagedCache(model.cache_shapes, 1, 2, model.dtype, model.device)


def _trial_batch(model: CausalModel) -> Batch:
    return Batch((1, 2), (0, 1), (0, 1), (Span(0, 0, 0, 2),), ((0,),))


@torch.inference_mode()
def _tuple_layers(model: CausalModel) -> set[int]:
    """Layers of a transformers module that return their hidden states within a tuple."""
    found: set[int] = set()

    def note(layer: int, output: Any) -> None:
        if isinstance(output, tuple):
            found.add(layer)
            output, *more = output
            if any(isinstance(other, torch.Tensor) for other in more):
                output = None  # a second stream beside the hidden states: what would it be?
        if not isinstance(output, torch.Tensor):
            raise UnsupportedModelError(
                f"{type(model.hf).__name__}: layer {layer} does not return hidden states alone, "
                "so it cannot be left out; use another drafter"
            )

    hooks = [
        model.layer_module(n).register_forward_hook(lambda *call, n=n: note(n, call[2]))
        for n in range(model.num_layers)
    ]
    try:
        model(_trial_batch(model), _trial_cache(model))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _without(model: CausalModel, skipped: frozenset[int], tuples: set[int]) -> Any:
    """A transformers module whose skipped layers pass their input on.

    New are the modules on the way from the top to a skipped layer, and nothing else. The lists of
    layers keep their length, since models look up masks and rotary tables by the index in them.
    """
    names = {id(module): name for name, module in model.hf.named_modules()}
    top = model.hf
    for number in skipped:
        layer = model.layer_module(number)
        top = _replaced(top, names[id(layer)].split("."), _passing(layer, number in tuples))
    return top


def _replaced(module: Any, path: Sequence[str], new: Any) -> Any:
    """A copy of a module that differs in one descendant; all the others are shared."""
    name, *rest = path
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    copied._modules[name] = _replaced(copied._modules[name], rest, new) if rest else new
    return copied


def _passing(layer: Any, in_tuple: bool) -> Any:
    """A layer that returns its input; all attributes stay, as models read some of them."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden,) if in_tuple else hidden

    copied = copy.copy(layer)
    copied.forward = forward
    return copied

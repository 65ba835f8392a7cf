"""Modules of transformers with some layers left out, at no cost of memory.

embedding -> layer 0 -> (layer 1) -> layer 2 -> ... -> final norm -> head
                        left out
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline.errors import UnsupportedModelError


def layers_in_tuples(
    hf: Any, layers: Sequence[torch.nn.Module], run: Callable[[], Any]
) -> set[int]:
    """Those that return their hidden states within a tuple, while ``run`` does a forward. Raises
    UnsupportedModelError for a layer that returns more than hidden states."""
    in_tuples: set[int] = set()

    def note(layer: int, output: Any) -> None:
        if isinstance(output, tuple):
            in_tuples.add(layer)
            output, *more = output
            if any(isinstance(other, torch.Tensor) for other in more):
                output = None  # a second stream beside the hidden states: what would it be?
        if not isinstance(output, torch.Tensor):
            raise UnsupportedModelError(
                f"{type(hf).__name__}: layer {layer} does not return hidden states alone, "
                "so it cannot be left out; use another drafter"
            )

    hooks = [
        layer.register_forward_hook(lambda *call, n=n: note(n, call[2]))
        for n, layer in enumerate(layers)
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return in_tuples


def without_layers(
    hf: Any, names: Sequence[str], skipped: Iterable[int], in_tuples: set[int]
) -> Any:
    """A module whose ``skipped`` layers pass their input on; ``names`` are those of all layers.

    New are the modules on the way from the top to a skipped layer, and nothing else. The lists of
    layers keep their length, since models look up masks and rotary tables by the index in them.
    """
    top = hf
    for number in skipped:
        passing = _passing(hf.get_submodule(names[number]), number in in_tuples)
        top = _replaced(top, names[number].split("."), passing)
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

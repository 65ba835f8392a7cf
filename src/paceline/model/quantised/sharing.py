"""Copies of modules that share parameters with the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def copy_beside(
    module: Any,
    stand_in: Callable[[Any], nn.Module | None],
    finish: Callable[[nn.Module], None] = lambda _: None,
) -> Any:
    """A copy with the very same parameters, in which each module that has a ``stand_in`` gives way
    to it. ``finish`` is called with every module that was copied."""
    other = stand_in(module)
    if other is not None:
        return other
    copied = copy.copy(module)
    # Tables of its own: parameters, hooks and children are looked up in them.
    vars(copied).update(
        {key: copy.copy(v) for key, v in vars(module).items() if isinstance(v, dict)}
    )
    copied._modules = {
        name: copy_beside(child, stand_in, finish) for name, child in module._modules.items()
    }
    finish(copied)
    return copied


def children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """All descendants with their parents and names; they may be replaced meanwhile."""
    for parent in list(module.modules()):
        for key, child in list(parent.named_children()):
            yield parent, key, child

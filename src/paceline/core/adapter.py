"""LoRA adapters, and the rows of a batch that they change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

_Value = TypeVar("_Value")
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, eq=False)  # compared by identity, as a name may be loaded again
class Adapter:
    """A LoRA adapter: low-rank additions to linear modules (Hu et al. 2021, arXiv 2106.09685).

    ``pairs``: by module name A ``[r, inputs]`` and B ``[outputs, r]``, with the scale multiplied
    in; the module adds B A x to the output of a row x. ``number``: unique in the process; prefix
    cache and drafters keep their data apart by it, 0 means no adapter. Requests hold a reference,
    so unloading an adapter does not end those that decode with it."""

    name: str
    folder: str
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(repr=False)
    number: int = field(default_factory=lambda: next(_NUMBERS))


_NO_ADAPTER = Adapter("", "", {}, 0)


class PerAdapter(Generic[_Value]):
    """One value for requests without an adapter, and one per adapter, which is dropped with it."""

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[Adapter, _Value] = WeakKeyDictionary()

    def get(self, adapter: Adapter | None, make: Callable[[], _Value]) -> _Value:
        """The adapter's value; ``make`` makes it the first time. (A stored ``make`` could be a
        reference cycle, so the caller passes it.)"""
        value = self._values.get(adapter or _NO_ADAPTER)
        if value is None:
            value = self._values[adapter or _NO_ADAPTER] = make()
        return value


@dataclass(frozen=True)
class AdapterRun:
    """Consecutive rows of a batch that have the same adapter, and their rows of logits."""

    adapter: Adapter
    rows: slice
    logits: slice

"""A LoRA adapter as the stages of a step know it, and which rows of a batch it changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

_Kept = TypeVar("_Kept")
_NUMBERS = itertools.count(1)


@dataclass(frozen=True, eq=False)  # compared by identity: a name may be loaded again
class Adapter:
    """Low-rank additions to linear modules (Hu et al. 2021, arXiv 2106.09685).

    ``pairs``: by module name A ``[r, inputs]`` and B ``[outputs, r]``, scaled: a row x of the
    module gets B A x on top. ``number``: unique in the process; what is kept of texts and caches is
    kept by it, 0 is no adapter. Who decodes with it holds it: unloading it ends no request."""

    name: str
    folder: str
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(repr=False)
    number: int = field(default_factory=lambda: next(_NUMBERS))


class ByAdapter(Generic[_Kept]):
    """What is kept of requests without an adapter, and of those with each: dropped with it."""

    def __init__(self) -> None:
        self._base: _Kept | None = None
        self._adapted: WeakKeyDictionary[Adapter, _Kept] = WeakKeyDictionary()

    def of(self, adapter: Adapter | None, make: Callable[[], _Kept]) -> _Kept:
        """``make`` makes it at first. (Stored it might be a reference cycle.)"""
        if adapter is not None:
            if adapter not in self._adapted:
                self._adapted[adapter] = make()
            return self._adapted[adapter]
        if self._base is None:
            self._base = make()
        return self._base


@dataclass(frozen=True)
class AdapterRun:
    """Neighbouring rows of a batch with one adapter, and their rows of logits."""

    adapter: Adapter
    rows: slice
    logits: slice


def adapter_runs(
    rows: Sequence[tuple[Adapter | None, int]], wanted: Sequence[int] | None
) -> list[AdapterRun]:
    """The runs of spans of so many rows; ``wanted``: ascending rows with logits, None for all."""
    runs: list[AdapterRun] = []
    if all(adapter is None for adapter, _ in rows):
        return runs
    start = 0
    for adapter, group in itertools.groupby(rows, lambda span: span[0]):
        end = start + sum(count for _, count in group)
        if adapter is not None:
            logits = slice(start, end)
            if wanted is not None:
                logits = slice(sum(r < start for r in wanted), sum(r < end for r in wanted))
            runs.append(AdapterRun(adapter, slice(start, end), logits))
        start = end
    return runs

"""LoRA adapters, and the rows of a batch that they change."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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


class PerAdapter(Generic[_Value]):
    """One value for requests without an adapter, and one per adapter, which is dropped with it."""

    def __init__(self) -> None:
        self._base: _Value | None = None
        self._adapted: WeakKeyDictionary[Adapter, _Value] = WeakKeyDictionary()

    def get(self, adapter: Adapter | None, make: Callable[[], _Value]) -> _Value:
        """The adapter's value; ``make`` makes it the first time. (A stored ``make`` could be a
        reference cycle, so the caller passes it.)"""
        if adapter is not None:
            if adapter not in self._adapted:
                self._adapted[adapter] = make()
            return self._adapted[adapter]
        if self._base is None:
            self._base = make()
        return self._base


@dataclass(frozen=True)
class AdapterRun:
    """Consecutive rows of a batch that have the same adapter, and their rows of logits."""

    adapter: Adapter
    rows: slice
    logits: slice


def adapter_runs(
    spans: Sequence[tuple[Adapter | None, int]], logit_rows: Sequence[int] | None
) -> list[AdapterRun]:
    """Runs of a batch whose ``spans`` have these adapters and numbers of rows. ``logit_rows``:
    ascending rows that have logits, None for all."""
    runs: list[AdapterRun] = []
    if all(adapter is None for adapter, _ in spans):
        return runs
    start = 0
    for adapter, group in itertools.groupby(spans, lambda span: span[0]):
        end = start + sum(count for _, count in group)
        if adapter is not None:
            logits = slice(start, end)
            if logit_rows is not None:
                logits = slice(sum(r < start for r in logit_rows), sum(r < end for r in logit_rows))
            runs.append(AdapterRun(adapter, slice(start, end), logits))
        start = end
    return runs

"""LoRA adapters on transformers' modules: each linear layer adds its product to the rows that ask
for it (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn

from paceline.core.adapter import AdapterRun
from paceline.core.bound import bound

# Of a forward under way, what each layer adds to its outputs for its inputs.
_ADDED: ContextVar[Mapping[nn.Module, Callable[[Tensor, Tensor], None]] | None] = ContextVar(
    "added", default=None
)
# int64 [n]: rows of the batch that layers within a recurrence take now; None: all, in order.
ROWS: ContextVar[Tensor | None] = ContextVar("rows", default=None)


@contextmanager
def adapting(hf: Any, runs: Sequence[AdapterRun], rows: int) -> Iterator[None]:
    """A context of one forward of so many ``rows``, in which modules of ``hf`` add what the
    adapters of ``runs`` say."""
    names = {name for run in runs for name in run.adapter.pairs}
    added = {hf.get_submodule(name): partial(_add, runs, name, rows) for name in names}

    def add(module: nn.Module, args: Any, out: Tensor) -> None:
        if _ADDED.get() is added:  # else another engine's forward of these modules
            added[module](args[0], out)

    hooks = [module.register_forward_hook(add) for module in added]
    try:
        with bound(_ADDED, added):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _add(runs: Sequence[AdapterRun], name: str, count: int, inputs: Tensor, out: Tensor) -> None:
    """To ``out [..., rows, outputs]`` of the module ``name`` for ``inputs [..., rows, inputs]``; a
    head's are the rows with logits alone, unlike all ``count``."""
    inputs, out, rows = inputs.flatten(0, -2), out.view(-1, out.shape[-1]), ROWS.get()
    for run in runs:
        if name not in run.adapter.pairs:
            continue
        a, b = run.adapter.pairs[name]
        if rows is None:
            part = run.rows if len(inputs) == count else run.logits
            out[part] += inputs[part] @ a.T @ b.T
        else:  # a device would be waited for to learn which rows these are
            its = (rows >= run.rows.start) & (rows < run.rows.stop)
            out += (inputs * its[:, None]) @ a.T @ b.T


def reads_weight(module: Any, name: str) -> bool:
    """Whether a module multiplies the weight of its layer ``name`` by itself, where no adapter adds
    anything."""
    kinds: tuple[Any, ...] = type(module).__mro__
    theirs = [kind for kind in kinds if kind.__module__.startswith("transformers.models.")]
    # A recurrence's forward calls other methods (Jamba's time step).
    products = any(f"self.{name}.weight @" in _source(kind) for kind in theirs)
    return products or f"self.{name}.weight" in _source(kinds[0].forward)


def _source(thing: Any) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return ""

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


def with_adapters(layer: Any) -> Any:
    """The layer as a recurrence gets it that multiplies its weight by itself, as Jamba's does."""
    added = _ADDED.get()
    return layer if added is None or layer not in added else _Adapted(layer, added[layer])


class _Adapted:
    """A linear layer, or its weight, whose product has what adapters add."""

    def __init__(self, adapted: Any, add: Callable[[Tensor, Tensor], None]) -> None:
        self._adapted, self._add = adapted, add

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._adapted, name)
        return _Adapted(value, self._add) if name == "weight" else value

    def __call__(self, inputs: Tensor) -> Any:
        return self._adapted(inputs)

    def __matmul__(self, inputs: Tensor) -> Tensor:
        """Of ``inputs [..., inputs, rows]``."""
        out: Tensor = (self._adapted @ inputs).mT.contiguous()
        self._add(inputs.mT, out)
        return out.mT


def reads_weight(module: Any, name: str) -> bool:
    """Whether a module multiplies the weight of its layer ``name`` by itself, where no adapter adds
    anything."""
    try:
        return f"self.{name}.weight" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False

"""LoRA adapters on modules of transformers (Hu et al. 2021, arXiv 2106.09685): forward hooks add an
adapter's product to the outputs of the rows that use the adapter."""

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

# In the running forward: for each adapted layer, a function (inputs, outputs) that adds to these.
_Add = Callable[[Tensor, Tensor], None]
_ADDED: ContextVar[Mapping[nn.Module, _Add] | None] = ContextVar("added", default=None)
# int64 [n]: the rows of the batch that a recurrent layer runs now; None: all rows, in order.
ROWS: ContextVar[Tensor | None] = ContextVar("rows", default=None)


@contextmanager
def applying_adapters(hf: Any, runs: Sequence[AdapterRun], rows: int) -> Iterator[None]:
    """A context for one forward over ``rows`` rows: modules of ``hf`` apply the adapters."""
    names = {name for run in runs for name in run.adapter.pairs}
    added = {hf.get_submodule(name): partial(_add, runs, name, rows) for name in names}

    def add(module: nn.Module, args: Any, out: Tensor) -> None:
        if _ADDED.get() is added:  # otherwise another engine runs these modules at the same time
            added[module](args[0], out)

    hooks = [module.register_forward_hook(add) for module in added]
    try:
        with bound(_ADDED, added):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _add(runs: Sequence[AdapterRun], name: str, count: int, inputs: Tensor, out: Tensor) -> None:
    """Add the adapters' products to ``out [..., rows, outputs]`` of the module ``name``, for
    ``inputs [..., rows, inputs]``. If there are fewer than ``count`` rows, the module is the head,
    which runs only the rows with logits."""
    inputs, out, rows = inputs.flatten(0, -2), out.view(-1, out.shape[-1]), ROWS.get()
    for run in runs:
        if name not in run.adapter.pairs:
            continue
        a, b = run.adapter.pairs[name]
        if rows is None:
            part = run.rows if len(inputs) == count else run.logits
            out[part] += inputs[part] @ a.T @ b.T
        else:  # a mask, as selecting rows would wait for the device
            in_run = (rows >= run.rows.start) & (rows < run.rows.stop)
            out += (inputs * in_run[:, None]) @ a.T @ b.T


def with_adapters(layer: Any) -> Any:
    """The layer, wrapped if it has adapters, for a recurrence that multiplies with the layer's
    weight directly, as Jamba's does."""
    added = _ADDED.get()
    return layer if added is None or layer not in added else _Adapted(layer, added[layer])


class _Adapted:
    """A linear layer, or its weight, whose products include those of the adapters."""

    def __init__(self, adapted: Any, add: Callable[[Tensor, Tensor], None]) -> None:
        self._adapted, self._add = adapted, add

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._adapted, name)
        return _Adapted(value, self._add) if name == "weight" else value

    def __call__(self, inputs: Tensor) -> Any:
        return self._adapted(inputs)

    def __matmul__(self, inputs: Tensor) -> Tensor:
        """The product with ``inputs [..., inputs, rows]``."""
        out: Tensor = (self._adapted @ inputs).mT.contiguous()
        self._add(inputs.mT, out)
        return out.mT


def reads_weight_of(module: Any, name: str) -> bool:
    """Whether a module multiplies with the weight of its layer ``name`` directly, so that a hook of
    the layer does not see the product."""
    try:
        return f"self.{name}.weight" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False

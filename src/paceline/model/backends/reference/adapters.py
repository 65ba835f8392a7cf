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
    inputs, out = inputs.flatten(0, -2), out.view(-1, out.shape[-1])
    for run in runs:
        if name in run.adapter.pairs:
            a, b = run.adapter.pairs[name]
            part = run.rows if len(inputs) == count else run.logits
            out[part] += inputs[part] @ a.T @ b.T


def reads_weight_of(module: Any, name: str) -> bool:
    """Whether a module multiplies with the weight of its layer ``name`` directly, so that a hook of
    the layer does not see the product."""
    try:
        return f"self.{name}.weight" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False

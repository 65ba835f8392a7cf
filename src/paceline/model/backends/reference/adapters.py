"""What adapters add to the outputs of linear modules, by hooks of one forward on one thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from paceline.core.adapter import AdapterRun


@contextmanager
def adapting(hf: Any, runs: Sequence[AdapterRun], head: Any) -> Iterator[None]:
    """A context in which the modules of ``hf`` add what the adapters of ``runs`` say. ``head``:
    the module that gets the rows with logits alone, or None."""
    thread, hooks = threading.get_ident(), []
    for name in {name for run in runs for name in run.adapter.pairs}:

        def add(module: Any, args: Any, out: torch.Tensor, name: str = name) -> None:
            if threading.get_ident() != thread:  # another engine's forward of these modules
                return
            inputs, outputs = args[0].flatten(0, -2), out.view(-1, out.shape[-1])
            for run in runs:
                if name in run.adapter.pairs:
                    a, b = run.adapter.pairs[name]
                    rows = run.logits if module is head else run.rows
                    outputs[rows] += inputs[rows] @ a.T @ b.T

        hooks.append(hf.get_submodule(name).register_forward_hook(add))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

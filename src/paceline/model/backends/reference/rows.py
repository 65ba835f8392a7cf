"""Corrects two kinds of transformers modules in which one sequence of a batch affects the others.

- A rotary embedding with short and long factors (longrope) chooses one set for the whole batch, by
  its largest position. Here each row gets the set of its sequence: the long one from ``switch`` + 1
  tokens on, as in a forward without a cache and in Phi-3's ``generate``.
- Llama 4's attention without rotary embedding scales queries by the length of the cache plus the
  row's index in the batch. Here it uses the row's position.

The corrections are hooks, which do nothing outside our forwards.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from paceline.errors import UnsupportedModelError
from paceline.model.backends.reference.attention import STEP
from paceline.model.backends.reference.recurrent import cache_name
from paceline.model.paged.segments import DeviceBatch

_HOOKED: WeakSet[torch.nn.Module] = WeakSet()


def correct_rows(hf: torch.nn.Module, max_positions: int) -> int | None:
    """Correct the modules of a model. Returns the number of tokens up to which a sequence uses the
    short RoPE factors; None without longrope. Raises UnsupportedModelError for rotary embeddings
    that cannot be corrected."""
    switches = {module: _switch_of(module, max_positions) for module in hf.modules()}
    lengths = sorted({switch for switch in switches.values() if switch is not None})
    if len(lengths) > 1:
        raise UnsupportedModelError(
            f"{type(hf).__name__}: its layers change their rotary embeddings at different "
            f"lengths ({lengths}); only one such length is supported, use another model"
        )
    for module, switch in switches.items():
        if module in _HOOKED:
            continue
        if switch is not None:
            module.register_forward_hook(partial(_rotate_by_row, switch), with_kwargs=True)
            _HOOKED.add(module)
        elif _scales_by_row(module):
            module.register_forward_pre_hook(_count_by_row, with_kwargs=True)
            _HOOKED.add(module)
    return lengths[0] if lengths else None


def _long_rows(batch: DeviceBatch, switch: int) -> torch.Tensor | None:
    """bool ``[T]``: which rows use the long factors; None if no row does."""
    # A draft model's cache may not have marked a sequence as long yet: look at positions, too.
    long = [s.long or max(s.positions, default=0) >= switch for s in batch.spans]
    if not any(long):
        return None
    rows = [flag for flag, s in zip(long, batch.spans, strict=True) for _ in range(s.rows)]
    return torch.tensor(rows, device=batch.positions.device)


def _switch_of(module: Any, max_positions: int) -> int | None:
    """The smallest position at which the module switches to the long factors, if it ever does."""
    types = getattr(module, "rope_type", None)
    switches: set[int | None] = set()
    for kind, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
        switch = None
        if rope_type == "longrope":
            parameters = module.config.rope_parameters
            options = parameters if kind is None else parameters[kind]
            switch = int(options["original_max_position_embeddings"])
        elif "dynamic" in str(rope_type) and max_positions > module.original_max_seq_len:
            raise UnsupportedModelError(
                f"the rotary embedding of type {rope_type} goes on changing with the length of the "
                f"batch from {module.original_max_seq_len} positions on, so one request would "
                "change another's text; set max_position_embeddings to the length without scaling"
            )
        switches.add(None if switch is None or switch >= max_positions else switch)
    if len(switches) > 1:
        raise UnsupportedModelError(
            f"{type(module).__name__}: only some kinds of layers change their rotary embedding "
            "with the length, which is not supported; use another model"
        )
    return switches.pop() if switches else None


def _rotate_by_row(
    switch: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Forward hook: computes both sets of cosines and sines, and selects one for each row."""
    step = STEP.get(None)
    long_rows = None if step is None else _long_rows(step.batch, switch)
    if long_rows is None:
        return None
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    positions = bound.arguments["position_ids"]  # [1, T]

    def rotations(positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bound.arguments["position_ids"] = positions
        result = module.forward(*bound.args, **bound.kwargs)
        return result if isinstance(result, tuple) else (result,)

    # The module decides by the largest position, so one more row at the switch makes it use "long".
    short = rotations(positions.clamp(max=switch - 1))
    long = rotations(torch.cat((positions, torch.full_like(positions[:, :1], switch)), 1))
    chosen = [
        torch.where(long_rows[:, None], b[:, :-1], a) for a, b in zip(short, long, strict=True)
    ]
    return tuple(chosen) if isinstance(output, tuple) else chosen[0]


def _scales_by_row(module: Any) -> bool:
    """Whether this is an attention module as Llama 4's, which scales queries by their index."""
    tuned = getattr(module, "attn_temperature_tuning", False)
    return bool(tuned) and not getattr(module, "use_rope", True) and hasattr(module, "layer_idx")


class _RowLengths:
    """Stands in for a cache: its length for a row is the row's position minus its batch index."""

    def __init__(self, positions: torch.Tensor) -> None:
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer: int = 0) -> torch.Tensor:
        return self._lengths

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        return key, value


def _count_by_row(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: passes the lengths by row as the module's cache."""
    step = STEP.get(None)
    if step is None:
        return None
    name = cache_name(module.forward) or ""
    return args, {**kwargs, name: _RowLengths(step.batch.positions)}

"""Steps of recurrent layers: all rows of a batch in one call of transformers' mixer.

transformers' functions of one step take a token and a state for each sequence. Within ``at_once``
ours stand in for them: each row comes as a sequence of its own, and the slots of a StateStore as
the states. What depends on a state goes level by level and is written to the slots in place; the
rest of the mixer runs once for all rows. Elsewhere, and on other threads, transformers' run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from paceline.model.paged.states import StateLevel

_LEVELS: ContextVar[Sequence[StateLevel]] = ContextVar("levels", default=())


@contextmanager
def at_once(levels: Sequence[StateLevel]) -> Iterator[None]:
    """A context in which a mixer's forward takes the rows of all ``levels``."""
    before = _LEVELS.set(levels)
    try:
        yield
    finally:
        _LEVELS.reset(before)


@cache
def stand_in(module: str) -> None:
    """Have a module of transformers call ours within ``at_once``."""
    for name, ours in _STEPS.items():
        theirs = getattr(sys.modules[module], name, None)
        if theirs is not None:
            setattr(sys.modules[module], name, _choosing(theirs, ours))


def _choosing(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def step(*args: Any, **options: Any) -> Any:
        return ours(theirs, *args, **options) if _LEVELS.get() else theirs(*args, **options)

    return step


def _convolution(
    theirs: Callable[..., Tensor], x: Tensor, states: Tensor, *args: Any, **options: Any
) -> Tensor:
    """``x [rows, C, 1]`` behind the last inputs ``states [slots, C, kernel]``."""
    windows = states.new_empty(len(x), *states.shape[1:])
    for level in _LEVELS.get():
        window = windows[level.span] = states[level.before]
        states[level.behind] = torch.cat((window[..., 1:], x[level.span]), -1)
    return theirs(x, windows, *args, **options)


def _scaled(states: Tensor, by: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Of each level its rows, and the states before them times ``by [rows, heads]``; what becomes
    of these is kept in the slots behind."""
    for level in _LEVELS.get():
        alone = isinstance(level.behind, slice)
        state = torch.mul(
            *(states[level.before], by[level.span, :, None, None]),
            out=states[level.behind] if alone else None,
        )
        yield level.span, state
        if not alone:
            states[level.behind] = state


def _mamba2(
    theirs: object,
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    *,
    dt_bias: Tensor,
    z: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """``selective_state_update`` of mamba_ssm with one decay a head (Dao & Gu 2024, arXiv
    2405.21060): ``states [slots, heads, width, N]``, ``x [rows, heads, width]``, ``B`` and ``C``
    ``[rows, groups, N]``; ``dt``, ``A``, ``D`` and ``dt_bias`` are the same along width and N."""
    dt = softplus((dt + dt_bias)[..., 0].float())
    group = x.shape[1] // B.shape[1]
    B, C = (part.float().repeat_interleave(group, 1) for part in (B, C))
    added, wide = dt[..., None] * B, x.float()
    out = torch.empty_like(wide)
    for rows, state in _scaled(states, (dt * A[:, 0, 0].float()).exp()):
        state.addcmul_(wide[rows, :, :, None], added[rows, :, None])
        out[rows] = (C[rows, :, None] @ state.mT)[:, :, 0]  # 8x faster than state @ C
    out = out + wide * D
    return (out if z is None else out * silu(z)).to(x.dtype)


def _delta_rule(
    theirs: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``fused_recurrent_gated_delta_rule`` of flash-linear-attention (Yang et al. 2024, arXiv
    2412.06464): ``initial_state [slots, heads, keys, values]``, the others ``[rows, 1, heads,
    ...]``, queries and keys of fewer heads."""
    states, group = initial_state, value.shape[2] // key.shape[2]
    q, k, v, decay, beta = (part[:, 0].float() for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (part * torch.rsqrt((part * part).sum(-1, True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(group, 1) for part in (q / q.shape[-1] ** 0.5, k))
    out = torch.empty_like(v)
    for rows, state in _scaled(states, decay.exp()):
        error = v[rows, :, None] - k[rows, :, None] @ state
        state.addcmul_(k[rows, :, :, None], error * beta[rows, :, None, None])
        out[rows] = (q[rows, :, None] @ state)[:, :, 0]
    return out[:, None].to(query.dtype), states


_STEPS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": _convolution,
    "mamba2_selective_state_update": _mamba2,
    "torch_recurrent_gated_delta_rule": _delta_rule,
}

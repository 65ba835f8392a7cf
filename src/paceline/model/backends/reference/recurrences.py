"""Single steps of recurrent layers, for all rows of a batch in one call of transformers' mixer.

transformers has functions that advance one token per sequence, given a state per sequence. Within
``batched_steps`` they are replaced by ours: each row of the batch counts as a sequence, and the
slots of a StateStore are the states. What depends on a state runs level by level and is written
into the slots in place, by the kernels where they are built (csrc/recurrence.h). The rest of the
mixer runs once for all rows. Outside that context, and on other threads, transformers' own
functions run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from paceline.core.bound import bound
from paceline.kernels.compile import NativeUnavailableError, is_built
from paceline.kernels.library import CRecurrence, check, library, pointer
from paceline.model.paged.states import StateStep

_NO_STEP = StateStep((), ())
_STEP: ContextVar[StateStep] = ContextVar("step", default=_NO_STEP)


def batched_steps(step: StateStep) -> AbstractContextManager[None]:
    """A context in which a mixer's forward runs the rows of all levels of ``step``."""
    return bound(_STEP, step)


@cache
def patch_step_functions(module: str) -> None:
    """Make the code of a transformers module call our step functions within ``batched_steps``."""
    for name, ours in _STEP_FUNCTIONS.items():
        theirs = getattr(sys.modules[module], name, None)
        if theirs is not None:
            setattr(sys.modules[module], name, _dispatching(theirs, ours))


def _dispatching(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``ours`` within ``batched_steps``, and ``theirs`` elsewhere."""

    @wraps(theirs)
    def step(*args: Any, **options: Any) -> Any:
        if _STEP.get() is _NO_STEP:
            return theirs(*args, **options)
        return ours(*args, **options)

    return step


def _convolution(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """``causal_conv1d_update``: inputs ``x [rows, C, 1]``, which follow the last inputs of each
    sequence, ``states [slots, C, kernel]``."""
    from transformers.activations import ACT2FN

    windows = states.new_empty(len(x), *states.shape[1:])
    for level in _STEP.get().levels:
        window = windows[level.span]
        # Shift all channels by one in a single copy, which is faster than one per channel. Each
        # channel's last element is then the next channel's first; the input replaces it.
        window.view(-1)[:-1] = states[level.before].view(-1)[1:]
        window[..., -1:] = x[level.span]
        states[level.after] = window
    out = conv1d(windows, weight[:, None], bias, groups=len(weight))
    out = out if activation is None else ACT2FN[activation](out)
    # With the strides of [rows, 1, C]; with others torch copies the next layer's weight per row.
    return out.reshape(len(x), 1, -1).mT


def _decayed(states: Tensor, decay: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """For each level, its rows and the states before them times ``decay [rows, ...]``. The caller
    changes these in place, and the result goes into the slots after, which may be those before."""
    for level in _STEP.get().levels:
        slot = states[level.after] if isinstance(level.after, slice) else None
        state = torch.mul(states[level.before], decay[level.span], out=slot)
        yield level.span, state
        if slot is None:
            states[level.after] = state


@cache
def kernels() -> Any:
    """The kernels' library if it is already built; None otherwise, and torch computes the steps."""
    try:
        return library() if is_built() else None
    except NativeUnavailableError:
        return None


def _compiled(
    states: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Any = None
) -> Tensor | None:
    """The outputs of all rows, by the kernels (pl_run_recurrence); None where they cannot."""
    if states.device.type != "cpu" or states.dtype != torch.float32 or states.shape[-1] % 32:
        return None
    if not states.is_contiguous() or kernels() is None:
        return None
    parts = [None if p is None else p.contiguous() for p in (decay, beta, query, key, value)]
    sizes, out = (*query.shape, value.shape[-1]), torch.empty_like(value)
    slots = _STEP.get().slots
    struct = CRecurrence(*sizes, *map(pointer, (*slots, *parts, states, out)))
    check(kernels().pl_run_recurrence(struct, torch.get_num_threads()))
    return out


def _selective(
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
    """``selective_state_update`` of mamba_ssm: the step of Mamba for ``x [rows, width]``, and of
    Mamba-2 for ``x [rows, heads, width]``."""
    wide = x.float().contiguous()
    scan = _mamba if x.dim() == 2 else _mamba2
    out = scan(states, wide, dt, dt_bias, A, B, C) + wide * D
    return (out if z is None else out * silu(z)).to(x.dtype)


def _mamba(
    states: Tensor, x: Tensor, dt: Tensor, bias: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> Tensor:
    """Mamba (Gu and Dao 2023, arXiv 2312.00752): ``states [slots, width, N]``, ``x`` and ``dt``
    ``[rows, width]``, ``B`` and ``C`` ``[rows, N]``."""
    dt = softplus(dt.float() + bias)[..., None]
    added, C = (dt * x[..., None]) * B.float()[:, None], C.float()[:, None]
    out = torch.empty_like(x)
    for rows, state in _decayed(states, (dt * A.float()).exp()):
        out[rows] = (C[rows] @ state.add_(added[rows]).mT)[:, 0]
    return out


def _mamba2(
    states: Tensor, x: Tensor, dt: Tensor, bias: Tensor, A: Tensor, B: Tensor, C: Tensor
) -> Tensor:
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), with one decay per head: ``states [slots, heads,
    width, N]``, ``x [rows, heads, width]``, ``B`` and ``C`` ``[rows, groups, N]``; ``dt``, ``bias``
    and ``A`` are constant along width and N."""
    dt = softplus((dt + bias)[..., 0].float())
    group = x.shape[1] // B.shape[1]
    B, C = (part.float().repeat_interleave(group, 1) for part in (B, C))
    added, decay = dt[..., None] * B, (dt * A[:, 0, 0].float()).exp()
    out = _compiled(states, C, added, x, decay)
    if out is None:
        out = torch.empty_like(x)
        for rows, state in _decayed(states, decay[..., None, None]):
            state.addcmul_(x[rows, :, :, None], added[rows, :, None])
            out[rows] = (C[rows, :, None] @ state.mT)[:, :, 0]  # 8x faster than state @ C
    return out


def _delta_rule(
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
    2412.06464): ``initial_state [slots, heads, keys, values]``; the others are ``[rows, 1, heads,
    ...]``, where queries and keys may have fewer heads."""
    states, group = initial_state, value.shape[2] // key.shape[2]
    q, k, v, decay, beta = (part[:, 0].float() for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = (part * torch.rsqrt((part * part).sum(-1, True) + 1e-6) for part in (q, k))
    q, k = (part.repeat_interleave(group, 1) for part in (q / q.shape[-1] ** 0.5, k))
    v, decay = v.contiguous(), decay.exp()
    out = _compiled(states, q, k, v, decay, beta)
    if out is None:
        both, errors, beta = torch.stack((k, q), 2), torch.empty_like(v), beta[..., None]
        read = v.new_empty(*v.shape[:2], 2, v.shape[-1])
        for rows, state in _decayed(states, decay[..., None, None]):
            read[rows] = both[rows] @ state  # one product for keys and queries
            errors[rows] = (v[rows] - read[rows, :, 0]) * beta[rows]
            state.addcmul_(k[rows, :, :, None], errors[rows, :, None])
        out = read[:, :, 1] + (q * k).sum(-1, True) * errors
    return out[:, None].to(query.dtype), states


_STEP_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_update": _convolution,
    "mamba_selective_state_update": _selective,
    "mamba2_selective_state_update": _selective,
    "torch_recurrent_gated_delta_rule": _delta_rule,
}

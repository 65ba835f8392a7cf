"""Steps of recurrent layers: a row's numbers are the same whatever rows step beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.kernels.library import INSTRUCTIONS, choose, instructions
from paceline.model.backends.reference import recurrences
from paceline.model.backends.reference.recurrences import _STEP_FUNCTIONS, batched_steps
from paceline.model.paged.states import StateLevel, StateStep

ROWS = 8
Made = tuple[Tensor, Tensor]  # outputs of the rows, and the slots behind
Step = Callable[[Tensor, Tensor], Tensor]  # of some rows, over the slots


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _convolution(wide: int, dtype: torch.dtype) -> tuple[Tensor, Step]:
    x, weight = _numbers(ROWS, wide, 1).to(dtype), _numbers(wide, 4).to(dtype)
    step = _STEP_FUNCTIONS["causal_conv1d_update"]
    return _numbers(ROWS + 1, wide, 4).to(dtype), lambda rows, slots: step(
        x[rows], slots, weight, None, "silu"
    )


def _mamba(wide: int, dtype: torch.dtype) -> tuple[Tensor, Step]:
    x, dt, z = _numbers(3, ROWS, wide).to(dtype)
    a, (b, c), d = -_numbers(wide, 16).exp(), _numbers(2, ROWS, 16).to(dtype), _numbers(wide)
    step = _STEP_FUNCTIONS["mamba_selective_state_update"]
    return _numbers(ROWS + 1, wide, 16), lambda rows, slots: step(
        *(slots, x[rows], dt[rows], a, b[rows], c[rows], d), dt_bias=d, z=z[rows]
    )


def _mamba2(wide: int, dtype: torch.dtype) -> tuple[Tensor, Step]:
    heads, width, n = wide // 64, 64, 128
    x, dt = _numbers(ROWS, heads, width).to(dtype), _numbers(ROWS, heads).to(dtype)
    (b, c), (a, bias, d) = _numbers(2, ROWS, 1, n).to(dtype), _numbers(3, heads)[..., None]
    step = _STEP_FUNCTIONS["mamba2_selective_state_update"]
    return _numbers(ROWS + 1, heads, width, n), lambda rows, slots: step(
        *(slots, x[rows], dt[rows, :, None].expand(-1, -1, width)),
        *(-a.exp()[..., None].expand(-1, width, n), b[rows], c[rows], d),
        dt_bias=bias.expand(-1, width),
    )


def _delta_rule(wide: int, dtype: torch.dtype) -> tuple[Tensor, Step]:
    heads, n = wide // 64, 64
    q, k = _numbers(2, ROWS, 1, heads // 2, n).to(dtype)
    v, (g, beta) = _numbers(ROWS, 1, heads, n).to(dtype), _numbers(2, ROWS, 1, heads)
    step = _STEP_FUNCTIONS["torch_recurrent_gated_delta_rule"]
    return _numbers(ROWS + 1, heads, n, n), lambda rows, slots: step(
        *(q[rows], k[rows], v[rows]),
        **{"g": -g[rows].exp(), "beta": beta[rows].sigmoid(), "initial_state": slots},
        use_qk_l2norm_in_kernel=True,
    )[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [_convolution, _mamba, _mamba2, _delta_rule])
@torch.inference_mode()
def test_a_row_has_the_same_bits_beside_any_others(
    make: Callable[[int, torch.dtype], tuple[Tensor, Step]],
    dtype: torch.dtype,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two pending tokens, which share a slot, and a tree: in one call, and row by row."""
    if not compiled:
        monkeypatch.setattr(recurrences, "kernels", lambda: None)
    elif recurrences.kernels() is None:
        pytest.skip("the kernels are not built here")
    begin, step = make(256, dtype)
    parents, levels = [-1, 0, 1, 1, 2, 2, 3, 4], [[0], [1], [2, 3], [4, 5, 6], [7]]
    slots = [1, 1, 3, 4, 5, 6, 7, 8]
    before = [slots[parent] if parent >= 0 else 0 for parent in parents]
    together, apart = begin.clone(), begin.clone()
    with batched_steps(StateStep((), tuple(_level(rows, before, slots) for rows in levels))):
        outputs = step(torch.arange(ROWS), together)
    for row, parent in enumerate(parents):
        level = StateLevel(torch.arange(1), slice(0, 1), *_slots(parent + 1, row + 1))
        with batched_steps(StateStep((), (level,))):
            assert torch.equal(step(torch.tensor([row]), apart)[0], outputs[row])
    assert torch.equal(apart[2:], together[slots[1:]])
    monkeypatch.setattr(recurrences, "kernels", lambda: None)
    with batched_steps(StateStep((), tuple(_level(rows, before, slots) for rows in levels))):
        again = step(torch.arange(ROWS), begin)
    assert torch.allclose(
        again.float(), outputs.float(), 1e-2 if dtype.itemsize == 2 else 1e-5, 1e-5
    )
    assert torch.allclose(begin.float(), together.float(), 1e-5, 1e-5)


@pytest.mark.parametrize("make", [_mamba2, _delta_rule])
def test_every_instruction_set_has_the_same_bits(
    make: Callable[[int, torch.dtype], tuple[Tensor, Step]],
) -> None:
    if recurrences.kernels() is None:
        pytest.skip("the kernels are not built here")
    begin, step = make(256, torch.float32)
    best, made = instructions(), []
    chain = [list(range(ROWS)), list(range(1, ROWS + 1))]
    levels = StateStep((), tuple(_level([row], *chain) for row in range(ROWS)))
    for name in filter(choose, INSTRUCTIONS):
        with batched_steps(levels):
            made.append((name, step(torch.arange(ROWS), states := begin.clone()), states))
    choose(best)
    for name, outputs, states in made:
        assert torch.equal(outputs, made[-1][1]) and torch.equal(states, made[-1][2]), name


def _slots(*slots: int) -> list[slice]:
    return [slice(slot, slot + 1) for slot in slots]


def _level(rows: list[int], before: list[int], behind: list[int]) -> StateLevel:
    slots = [[of[row] for row in rows] for of in (before, behind)]
    alone = len(rows) == 1
    parts = _slots(*slots[0], *slots[1]) if alone else [torch.tensor(part) for part in slots]
    return StateLevel(torch.tensor(rows), slice(rows[0], rows[-1] + 1), *parts)

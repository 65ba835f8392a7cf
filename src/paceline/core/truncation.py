"""min_p, top_k and top_p without sorting whole vocabularies.

Truncation needs the head of a distribution: its largest probabilities in falling order. On a CPU
numpy finds it: for a row of 49,152 in 0.04 to 0.2 ms, where ``topk`` takes 0.36 and ``sort`` 5.7 to
7.5 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.params import SamplingParams
from paceline.core.transfer import to_device

_STRETCH = 128
# Above the rounding of a softmax's sum; a top_p beyond 1 - _ROUNDING keeps every token.
_ROUNDING = 1e-4
_BAR_FACTOR = 64.0

FloatRow = npt.NDArray[np.float32]


def column(
    params: Sequence[SamplingParams],
    value: Callable[[SamplingParams], float],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[R, 1]: one value per row."""
    return to_device([value(p) for p in params], device, dtype).unsqueeze(1)


def truncated(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The distributions [R, V] truncated and renormalised. min_p, top_k and top_p in turn raise a
    threshold [R, 1], below which entries become 0. top_p is a share of the mass left by the others,
    as in vLLM."""
    width, device = probs.shape[1], probs.device
    limits = [_limit(p, width) for p in params]
    nucleus = any(p.top_p < 1.0 for p in params)
    head = _head(probs, params, limits) if nucleus or any(limits) else probs
    if any(limits) or any(p.min_p > 0 for p in params):
        threshold = torch.zeros(probs.shape[0], 1, device=device)
        if any(p.min_p > 0 for p in params):
            threshold = probs.amax(dim=-1, keepdim=True) * column(params, lambda p: p.min_p, device)
        if any(limits):
            limit = to_device(limits, device).unsqueeze(1)
            kth = head.gather(1, (limit - 1).clamp_(min=0))
            threshold = torch.maximum(threshold, torch.where(limit > 0, kth, 0.0))
        probs = _at_least(probs, threshold)
        head = _at_least(head, threshold) if nucleus else head
    mass = probs.sum(dim=-1, keepdim=True)
    if nucleus:
        share = column(params, lambda p: p.top_p, device)
        before = head.cumsum(dim=-1) - head  # mass of the tokens that rank before each
        size = (before < share * mass).sum(dim=-1, keepdim=True).clamp_(min=1)
        last = torch.where(share < 1.0, head.gather(1, size - 1), 0.0)
        probs = _at_least(probs, last)
        mass = probs.sum(dim=-1, keepdim=True)
    if not all(p.truncates for p in params):
        # Other rows keep their bits.
        truncates = column(params, lambda p: p.truncates, device, torch.bool)
        mass = torch.where(truncates, mass, 1.0)
    return probs.div_(mass)


def _limit(params: SamplingParams, width: int) -> int:
    """top_k, or 0 if it does not limit."""
    return params.top_k if 0 < params.top_k < width else 0


def _at_least(probs: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """The distributions [R, n] with zeros below thresholds [R, 1]; three times faster than
    `where`."""
    return probs.clone().ge_(threshold).mul_(probs)


def _head(probs: torch.Tensor, params: Sequence[SamplingParams], limits: list[int]) -> torch.Tensor:
    """float32 [R, n], in falling order: a row's ``limit`` largest, or without a limit as many as
    hold more than the mass of its top_p. Zeros may follow."""
    if probs.device.type == "cpu":
        return _head_by_numpy(probs, params, limits)
    if any(p.top_p < 1 and not k for p, k in zip(params, limits, strict=True)):
        # Only the device knows how many are needed.
        return probs.sort(dim=-1, descending=True).values
    return probs.topk(max(limits), dim=-1).values


def _head_by_numpy(
    probs: torch.Tensor, params: Sequence[SamplingParams], limits: list[int]
) -> torch.Tensor:
    width = probs.shape[1]
    rows: npt.NDArray[np.float32] = probs.numpy()
    peaks = rows
    if any(limits) and width >= _STRETCH:
        whole = probs[:, : width // _STRETCH * _STRETCH]
        peaks = whole.view(len(probs), -1, _STRETCH).amax(-1).numpy()
    heads: list[FloatRow] = []
    for row, tops, p, limit in zip(rows, peaks, params, limits, strict=True):
        if limit:
            head = np.sort(_among_largest(row, tops, limit))[::-1][:limit]
        elif p.top_p < 1:
            head = np.sort(_holding(row, p.top_p))[::-1]
        else:
            head = row[:0]  # unused
        heads.append(head)
    padded = np.zeros((len(heads), max(1, *map(len, heads))), dtype=np.float32)
    for rank, head in enumerate(heads):
        padded[rank, : len(head)] = head
    return torch.from_numpy(padded)


def _holding(row: FloatRow, share: float) -> FloatRow:
    """The largest entries of a distribution, in any order, that hold more than ``share``. Entries
    below (1 - share) / n together cannot hold the rest. A higher bar mostly suffices, and leaves
    less to sort."""
    rest = 1.0 - share
    if rest < _ROUNDING:
        return row
    bar = 0.5 * rest / len(row)
    few = _where(row, row >= _BAR_FACTOR * bar)
    if float(few.sum(dtype=np.float64)) > share + 0.1 * _ROUNDING:
        return few
    return _where(row, row >= bar)


def _among_largest(row: FloatRow, peaks: FloatRow, count: int) -> FloatRow:
    """Entries, in any order, that include the ``count`` largest; ``peaks``: maxima of stretches of
    the row, or the row."""
    if len(peaks) < 2 * count or len(peaks) == len(row):
        return np.partition(row, len(row) - count)[len(row) - count :]
    # ``count`` stretches have a maximum of at least this bar: entries below are not needed.
    bar = np.partition(peaks, len(peaks) - count)[len(peaks) - count]
    return _where(row, ~(row < bar))  # NaN ranks first


def _where(row: FloatRow, mask: npt.NDArray[np.bool_]) -> FloatRow:
    """``row[mask]``, three times as fast."""
    return row[np.flatnonzero(mask)]

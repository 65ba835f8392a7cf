"""Argmax, top-k and truncation (min_p, top_k, top_p) of long rows, made fast on a CPU.

On a CPU torch's ``topk`` and the index of ``max`` are slow, while numpy's ``argmax`` and torch's
``amax`` are vectorised. On one core of a Zen 4, for 8 rows of 49,152 in float32, the argmax takes
0.03 instead of 0.33 ms, and the top 8, found by way of the maximum of every segment of a row, 0.10
instead of 0.48 ms.

Truncation needs the head of a distribution: its largest probabilities in descending order. On a CPU
numpy finds the 1,024 largest of 9 rows of 49,152 in 0.7 ms; ``topk`` takes 7.6 and ``sort`` 120 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.params import SamplingParams
from paceline.core.transfer import to_device

FloatRow = npt.NDArray[np.float32]

_SEGMENT = 128
_MIN_TWO_STAGE = 1 << 15  # entries from which two stages are faster than one


def row_max(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The maximum of each row, float32 [R], and its index, int64 [R], the lowest among equals.
    ``scores`` [R, V] have any float dtype. NaN counts as the largest value, as in torch."""
    if scores.device.type != "cpu":
        best = scores.max(dim=-1)
        return best.values.to(torch.float32), best.indices
    rows: FloatRow = scores.to(torch.float32).numpy()
    indices = rows.argmax(-1)
    return torch.from_numpy(rows[np.arange(len(rows)), indices]), torch.from_numpy(indices)


def top_k_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """int64 [R, k]: indices of the k largest entries of each row [R, V], the largest first. Which
    of equal entries are taken is not defined."""
    width = scores.shape[1]
    count = width // _SEGMENT
    small = scores.numel() < _MIN_TWO_STAGE or count < 2 * k or width % _SEGMENT
    if scores.is_cuda or small:
        wide = scores if scores.is_cuda else scores.to(torch.float32)
        return wide.topk(k, dim=-1).indices
    # The k largest entries lie in the k segments with the largest maxima.
    parts = scores.to(torch.float32).view(-1, count, _SEGMENT)
    segments = parts.amax(-1).topk(k, dim=-1).indices
    index = segments.unsqueeze(-1).expand(-1, -1, _SEGMENT)
    best = parts.gather(1, index).flatten(1).topk(k, dim=-1).indices
    within = best % _SEGMENT
    return segments.gather(1, best // _SEGMENT).mul_(_SEGMENT).add_(within)


def stable_top_k(scores: torch.Tensor, k: int) -> torch.Tensor:
    """``top_k_indices`` with the lowest ids first among equals, for results that users see: logits
    in bf16 are often equal, and which of them ``topk`` takes depends on the batch."""
    if scores.is_cuda:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    best = torch.empty(len(scores), k, dtype=torch.int64)
    for row, ids in enumerate(top_k_indices(scores, k) if k else ()):
        values: FloatRow = scores[row].to(torch.float32).numpy()
        least = values[int(ids[-1])]
        above = np.flatnonzero(values > least)
        equal = np.flatnonzero(~(values > least) & ~(values < least))[: k - len(above)]  # or NaN
        order = np.argsort(-values[above], kind="stable")
        best[row] = torch.from_numpy(np.concatenate((above[order], equal)))
    return best


_ROUNDING = 1e-4  # more than the rounding error in the sum of a softmax
_SHORTLIST = 1024  # entries that usually hold the mass of a top_p


def param_column(
    params: Sequence[SamplingParams],
    value: Callable[[SamplingParams], float],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """[R, 1] on ``device``: one value per row, from the parameters of the row's request."""
    return to_device([value(p) for p in params], device, dtype).unsqueeze(1)


def truncate(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply min_p, top_k and top_p to distributions [R, V] and renormalise them. Each sets a
    threshold [R, 1] below which entries become 0. top_p is a share of the mass that the other two
    leave, as in vLLM."""
    width, device = probs.shape[1], probs.device
    limits = [_effective_top_k(p, width) for p in params]
    nucleus = any(p.top_p < 1.0 for p in params)
    head = _head(probs, params, limits) if nucleus or any(limits) else probs
    if any(limits) or any(p.min_p > 0 for p in params):
        threshold = torch.zeros(probs.shape[0], 1, device=device)
        if any(p.min_p > 0 for p in params):
            min_p = param_column(params, lambda p: p.min_p, device)
            threshold = probs.amax(dim=-1, keepdim=True) * min_p
        if any(limits):
            limit = to_device(limits, device).unsqueeze(1)
            kth = head.gather(1, (limit - 1).clamp_(min=0))
            threshold = torch.maximum(threshold, torch.where(limit > 0, kth, 0.0))
        probs = _zero_below(probs, threshold)
        head = _zero_below(head, threshold) if nucleus else head
    mass = probs.sum(dim=-1, keepdim=True)
    if nucleus:
        share = param_column(params, lambda p: p.top_p, device)
        before = head.cumsum(dim=-1) - head  # mass of the tokens that rank before each
        size = (before < share * mass).sum(dim=-1, keepdim=True).clamp_(min=1)
        last = torch.where(share < 1.0, head.gather(1, size - 1), 0.0)
        probs = _zero_below(probs, last)
        mass = probs.sum(dim=-1, keepdim=True)
    if not all(p.truncates for p in params):
        # Rows without truncation keep their bits.
        truncates = param_column(params, lambda p: p.truncates, device, torch.bool)
        mass = torch.where(truncates, mass, 1.0)
    return probs.div_(mass)


def _effective_top_k(params: SamplingParams, width: int) -> int:
    """top_k, or 0 if it has no effect."""
    return params.top_k if 0 < params.top_k < width else 0


def _zero_below(probs: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Zero the entries of [R, n] below thresholds [R, 1]; three times as fast as ``where``."""
    return probs.clone().ge_(threshold).mul_(probs)


def _head(probs: torch.Tensor, params: Sequence[SamplingParams], limits: list[int]) -> torch.Tensor:
    """float32 [R, n]: the largest entries of each row in descending order: at least as many as its
    top_k (``limits``) or, without one, as hold more than the mass of its top_p."""
    width, count = probs.shape[1], max(limits)
    shares = [
        p.top_p if p.top_p < 1 and not k else 0.0 for p, k in zip(params, limits, strict=True)
    ]
    if probs.device.type != "cpu":
        if any(shares):  # the host does not know how many entries are needed
            return probs.sort(dim=-1, descending=True).values
        return probs.topk(count, dim=-1).values
    rows: npt.NDArray[np.float32] = probs.numpy()
    count = max(count, _SHORTLIST) if any(shares) else count
    while True:
        first = max(0, width - count)
        best = np.partition(rows, first, axis=-1)[:, first:]
        held = best.sum(-1, dtype=np.float64) > np.multiply(shares, 1 + _ROUNDING)
        if not first or bool(held.all()):
            return torch.from_numpy(np.sort(best, axis=-1)[:, ::-1].copy())
        count *= 8

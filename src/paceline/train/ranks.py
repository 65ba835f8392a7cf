"""What the processes of a training do with a batch: each learns a share, the sums are of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

_T = TypeVar("_T")


def dealt(items: Sequence[_T], tokens: Callable[[_T], int], ranks: int) -> list[list[_T]]:
    """The items of a batch by rank, so that each has about as many tokens."""
    shares: list[list[_T]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(items, key=tokens, reverse=True):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += tokens(item)
    return shares


def add_up(parameters: Sequence[nn.Parameter], loss: float) -> float:
    """Sum gradients and loss over all ranks, in place; returns the loss. A rank without a share of
    the batch has no gradients."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(part.flatten().float() for part in parts), torch.tensor([loss])])
    dist.all_reduce(flat)
    *sums, loss_sum = torch.split(flat, [*(p.numel() for p in parameters), 1])
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
    return float(loss_sum)

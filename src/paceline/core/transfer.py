"""Host values to device tensors without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def to_device(
    values: Sequence[Any],
    device: torch.device | str,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """A (nested) list of numbers as a tensor on ``device``.

    On CUDA the copy leaves from pinned memory and does not block the host; the caching host
    allocator keeps that memory until the copy has been done.
    """
    return upload(torch.tensor(values, dtype=dtype), device)


def upload(host: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A host tensor on ``device``; the same tensor if that is the CPU."""
    target = torch.device(device)
    if target.type == "cuda":
        return host.pin_memory().to(target, non_blocking=True)
    return host.to(target)

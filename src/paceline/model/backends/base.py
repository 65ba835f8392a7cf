"""What the layers of every backend are given: the step's attention over the paged cache."""

from __future__ import annotations

from typing import Protocol

import torch


class Attend(Protocol):
    """Stores the rows' keys and values and attends over the cache."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """``query [1, heads, T, d]``, ``key`` and ``value`` ``[1, kv_heads, T, d]``, after rotary
        embedding, to ``[1, T, heads, d]``."""
        ...

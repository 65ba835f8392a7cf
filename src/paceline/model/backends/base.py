"""What a backend gives: a forward over the paged cache; target.py adapts it to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from paceline.core.batch import Batch, ModelOutput


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


class Forward(Protocol):
    """One forward of a whole model, which stands for that of its transformers module."""

    def __call__(self, batch: Batch, attend: Attend, features: Sequence[int] = ()) -> ModelOutput:
        """As ``CausalModel.__call__``, with the step's attention given."""
        ...

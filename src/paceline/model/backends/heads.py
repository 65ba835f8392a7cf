"""Heads on a target's features: one step of an EAGLE head, and all Medusa heads, by torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from paceline.core.batch import Batch
from paceline.model.backends.growing import Growth
from paceline.model.backends.reference.attention import paged_attention
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.masks import FULL
from paceline.model.paged.segments import AttentionStep

# Logits ``[B, count, vocab]`` of the first ``count`` heads, from features ``[B, width]``.
DraftingHeads = Callable[[torch.Tensor, int], torch.Tensor]


# What the layers of a head call after rotary embedding: ``attend(query [1, heads, T, d],
# key and value [1, kv_heads, T, d], layer=, scaling=)`` stores keys and values and gives
# ``[1, T, heads, d]``.
Attend = Callable[..., torch.Tensor]


class EagleStep(Protocol):
    """Runs the EAGLE head ``head``; keys and values go into the cache."""

    head: Any

    @property
    def growth(self) -> Growth | None:
        """Grows whole trees with it; None where that cannot be done."""
        ...

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From features ``[T, layers * target_hidden]`` or, if ``fused``, earlier outputs ``[T,
        H]``: outputs ``[R, H]`` and logits ``[R, draft_vocab]`` at the rows whose logits are
        wanted."""
        ...


class ModuleEagle:
    """The head's own modules; ``embed`` maps ids of the target to embeddings ``[T, H]``."""

    growth: Growth | None = None

    def __init__(self, head: Any, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.head, self._embed = head, embed

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See EagleStep."""
        head, step = self.head, AttentionStep.of(batch, cache, (FULL,), device=cache.device)
        attend, rows = partial(paged_attention, step=step), step.batch
        inputs = hidden if fused else head.fuse(hidden)
        outputs: torch.Tensor = head(self._embed(rows.input_ids), inputs, rows.positions, attend)
        if rows.logit_rows is not None:
            outputs = outputs.index_select(0, rows.logit_rows)
        return outputs, head.logits(outputs) if len(outputs) else outputs

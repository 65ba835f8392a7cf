"""One step of an EAGLE head over its paged cache: on torch, or one call of the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from paceline.core.batch import Batch
from paceline.draft.heads.eagle_head import EagleHead
from paceline.draft.heads.native import NativeEagle
from paceline.model.backends.native.growth import NativeGrowth
from paceline.model.backends.native.model import NativeModel
from paceline.model.backends.native.recognise import STATIC_ROPE
from paceline.model.backends.reference.attention import paged_attention
from paceline.model.backends.reference.prepack import prepack_modules
from paceline.model.paged.cache import PagedCache
from paceline.model.paged.masks import FULL
from paceline.model.paged.pieces import AttentionStep
from paceline.model.target import CausalModel
from paceline.stages import warn

Embed = Callable[[torch.Tensor], torch.Tensor]


class EagleStep(Protocol):
    """Runs ``head``; keys and values go into the cache."""

    head: EagleHead

    @property
    def growth(self) -> NativeGrowth | None:
        """Grows whole trees with it; None where that cannot be done."""
        ...

    def __call__(
        self, batch: Batch, cache: PagedCache, hidden: torch.Tensor, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From features ``[T, layers * target_hidden]`` or, if ``fused``, earlier outputs ``[T,
        H]``: outputs ``[R, H]`` and logits ``[R, draft_vocab]`` at the rows whose logits are
        wanted."""
        ...


class ReferenceEagle:
    """The head's own modules; ``embed`` maps ids of the target to embeddings ``[T, H]``."""

    growth: NativeGrowth | None = None

    def __init__(self, head: EagleHead, embed: Embed) -> None:
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


def eagle_step(head: EagleHead, target: CausalModel) -> EagleStep:
    """The way that the target goes itself; lays out the head's weights for it, in place."""
    kind = head.rotary.rope_type
    if isinstance(target.native, NativeModel):
        if kind in STATIC_ROPE:
            return NativeEagle(head, target.native)
        warn(
            "the EAGLE head runs on the reference backend: "
            f"the rotary embedding {kind} depends on the length"
        )
    prepack_modules(head)
    return ReferenceEagle(head, head.embed_tokens or target.embedding("input"))

"""Rows of masks behind a text, with which a draft model learns to draft in one pass (PARD: An et
al. 2025, arXiv 2504.18583)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

_KEPT, _LEAST = 0.7, 0.2  # PARD's conditional drop: of each further token, and at least


class MaskedRows(NamedTuple):
    """R rows: a text's, and masks, of which one of depth d behind position t stands at t + d and
    sees the text up to t and the masks before it. ``positions`` int64 ``[R]``; ``seen`` bool ``[R,
    R]``."""

    token: int
    positions: torch.Tensor
    seen: torch.Tensor

    @classmethod
    def of(
        cls,
        token: int,
        width: int,
        count: int,
        first: int = 0,
        generator: torch.Generator | None = None,
    ) -> MaskedRows:
        """For drafts of ``count`` tokens behind the positions from ``first`` of ``width`` that have
        as many after them; with a ``generator`` some are dropped, more of the deeper masks."""
        behind = torch.arange(first, max(first, width - count + 1))
        starts, room = [torch.arange(width)], len(behind)
        for depth in range(1, count):
            if generator is not None:
                kept = int(room * max(_KEPT**depth, _LEAST))
                behind = behind[torch.randperm(len(behind), generator=generator)[:kept]]
                behind = behind.sort().values
            starts.append(behind)
        start = torch.cat(starts)
        depths = torch.cat([torch.full_like(part, n) for n, part in enumerate(starts)])
        text = (depths == 0) & (start <= start[:, None])
        chain = (start == start[:, None]) & (depths <= depths[:, None])
        return cls(token, start + depths, text | chain)

    def inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        """What a model of transformers reads for texts ``[B, width]``."""
        masks = len(self.positions) - ids.shape[1]
        return {
            "input_ids": F.pad(ids, (0, masks), value=self.token),
            "attention_mask": self.seen.to(ids.device)[None, None],
            "position_ids": self.positions.to(ids.device)[None],
        }

"""Drafts that start at positions of windows whose next tokens are to be learnt: blocks, and EAGLE
heads unrolled over their drafting steps (training-time test: Li et al. 2025, arXiv 2503.01840,
section 3); and rows of masks behind a text, with which a draft model learns to draft in one pass
(PARD: An et al. 2025, arXiv 2504.18583)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from paceline.train.losses import distribution_loss


class DraftStarts:
    """Where drafts start in windows ``[B, W]``: N positions, packed.

    A draft from position t reads the features up to t and token t + 1 and is about t + 2, t + 3,
    ... ``flat[n]``, int64, is ``window * W + t``; ``padded[n]`` its number in a table ``[B, R]``
    that has a line for every window, R being ``longest``.
    """

    def __init__(self, starts: torch.Tensor) -> None:
        """``starts`` bool ``[B, W]``."""
        self._starts = starts
        self.windows, self.width = starts.shape
        window, self.position = starts.nonzero(as_tuple=True)
        self.longest = int(starts.sum(1).max()) if starts.numel() else 0
        self.flat = window * self.width + self.position
        self.padded = window * self.longest + (starts.cumsum(1) - 1)[starts]

    @classmethod
    def of(cls, learn: torch.Tensor) -> DraftStarts:
        """Of the tokens to be learnt, bool ``[B, W]``: every t whose t + 2 is one of them."""
        return cls(F.pad(learn[:, 2:], (0, 2)))

    def every(self, stride: int, offset: int) -> tuple[DraftStarts, torch.Tensor]:
        """Those at multiples of ``stride`` minus ``offset``, and which they are, int64 ``[M]``."""
        columns = torch.arange(self.width, device=self.flat.device)
        regular = (columns + offset) % stride == 0
        return DraftStarts(self._starts & regular), regular[self.position].nonzero()[:, 0]

    @cached_property
    def unseen(self) -> torch.Tensor:
        """bool ``[B, 1, 1, R, W]``: committed tokens that a draft does not see."""
        last = self.flat.new_zeros(self.windows * self.longest)
        last = last.index_copy(0, self.padded, self.position)
        keys = torch.arange(self.width, device=last.device)
        return keys > last.view(self.windows, 1, 1, self.longest, 1)

    def ahead(self, count: int) -> torch.Tensor:
        """int64 [N]: the flat number of t + count, clamped to the same window."""
        return self.flat + (self.width - 1 - self.position).clamp(max=count)

    def inside(self, count: int) -> torch.Tensor:
        """bool [N]: whether t + count lies in the window."""
        return self.position + count < self.width


class DraftAttention:
    """Attention of N drafts of ``size`` rows: over the committed tokens of their window up to where
    they start, and over their own keys, with ``causal`` not over the rows behind.

    ``context``: keys and values of the committed tokens ``[1, kv_heads, B * W, d]`` by layer.
    Without it they are those of the first call, whose queries are of ``starts`` and see them alone;
    further calls are of ``then``, and see what these drafted so far.

    Products and a softmax in the head's dtype are, on a processor, several times as fast as torch's
    fused attention.
    """

    def __init__(
        self,
        starts: DraftStarts,
        then: DraftStarts | None = None,
        context: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        size: int = 1,
        causal: bool = False,
    ) -> None:
        self._starts, self._then = starts, then or starts
        self._context, self._size, self._causal = list(context), size, causal
        self._drafted: dict[int, list[torch.Tensor]] = {}  # keys and values by layer

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """As ``Attend``, of ``N * size`` rows."""
        starts, size, width = self._starts, self._size, query.shape[-1]
        windows, heads, kv_heads = starts.windows, query.shape[1], key.shape[1]
        q = self._table(query[0] * scaling).view(windows, kv_heads, -1, starts.longest, size, width)
        if self._context:  # [windows, kv_heads, R, rows so far, d]
            tables = [self._table(key[0]), self._table(value[0])]
            before = self._drafted.get(layer, [tables[0][..., :0, :]] * 2)
            drafted = [torch.cat(pair, 3) for pair in zip(before, tables, strict=True)]
            self._drafted[layer] = drafted
        else:
            drafted = [q[:, :, 0, :, :0]] * 2
            self._context, self._starts = [(key, value)], self._then
        k, v = (
            part[0].reshape(kv_heads, windows, -1, width).transpose(0, 1)
            for part in self._context[layer]
        )
        scores = (q.flatten(2, 4) @ k.transpose(-1, -2)).view(*q.shape[:-1], -1)
        scores = scores.masked_fill_(starts.unseen.unsqueeze(4), float("-inf"))
        of_drafts = q.transpose(2, 3)  # heads that share keys are rows of one product
        within = of_drafts.flatten(3, 4) @ drafted[0].transpose(-1, -2)
        within = within.view(*of_drafts.shape[:-1], -1).transpose(2, 3)
        if self._causal:
            ahead = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            within = within.masked_fill(ahead, float("-inf"))
        weights = torch.cat((scores, within), -1).softmax(-1)
        count = scores.shape[-1]
        out = (weights[..., :count].flatten(2, 4) @ v).view(q.shape)
        chosen = weights[..., count:].transpose(2, 3).flatten(3, 4) @ drafted[1]
        out = out + chosen.view(of_drafts.shape).transpose(2, 3)
        out = out.view(windows, heads, starts.longest, size, width).permute(0, 2, 3, 1, 4)
        rows: torch.Tensor = out.flatten(0, 1)[starts.padded]
        return rows.flatten(0, 1)[None]

    def _table(self, rows: torch.Tensor) -> torch.Tensor:
        """``[heads, N * size, d]`` as ``[windows, heads, R, size, d]``, zeros where drafts lack."""
        starts, (heads, _, width) = self._starts, rows.shape
        table = rows.new_zeros(starts.windows * starts.longest, heads, self._size, width)
        drafts = rows.view(heads, -1, self._size, width).transpose(0, 1)
        table = table.index_copy(0, starts.padded, drafts)
        return table.view(starts.windows, starts.longest, *table.shape[1:]).transpose(1, 2)


def loss_ahead(
    starts: DraftStarts,
    count: int,
    learn: torch.Tensor,
    logits: torch.Tensor,
    probs: torch.Tensor,
    row_of: torch.Tensor,
    tv_weight: float = 0.0,
) -> torch.Tensor:
    """Mean over the drafts of the loss of ``logits [N, V]`` about token t + 2 + ``count``, where
    that is to be learnt (``learn`` bool ``[B * W]``).

    ``probs [M, V]`` are what the target says, ``row_of [B * W]`` which of them about a
    position's next token; ``tv_weight`` as in ``distribution_loss``.
    """
    wanted = starts.inside(2 + count) & learn[starts.ahead(2 + count)]
    index = row_of[starts.ahead(1 + count)]
    return distribution_loss(logits, probs, index, wanted.float() / len(wanted), tv_weight)


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

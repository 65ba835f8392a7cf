"""Drafting at many positions of a batch at once, for training: blocks, EAGLE heads unrolled over
their drafting steps (training-time test: Li et al. 2025, arXiv 2503.01840, section 3), and mask
tokens with which a draft model learns to draft in one pass (PARD: An et al. 2025, arXiv
2504.18583)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from paceline.train.losses import distribution_loss


class DraftStarts:
    """The N positions of sequences ``[B, W]`` at which drafts start. A draft from position t reads
    the features up to t and token t + 1, and predicts tokens t + 2, t + 3, ... ``flat[n]`` int64 is
    the flat index ``sequence * W + t``. ``padded[n]`` is the index of the draft in a table ``[B,
    R]`` with a row for each sequence; R is ``longest``."""

    def __init__(self, starts: torch.Tensor) -> None:
        """``starts`` bool ``[B, W]``."""
        self._starts = starts
        self.windows, self.width = starts.shape
        window, self.position = starts.nonzero(as_tuple=True)
        self.longest = int(starts.sum(1).max()) if starts.numel() else 0
        self.flat = window * self.width + self.position
        self.padded = window * self.longest + (starts.cumsum(1) - 1)[starts]

    @classmethod
    def of(cls, loss_mask: torch.Tensor) -> DraftStarts:
        """The positions t whose token t + 2 is in the loss mask, bool ``[B, W]``."""
        return cls(F.pad(loss_mask[:, 2:], (0, 2)))

    def strided(self, stride: int, offset: int) -> tuple[DraftStarts, torch.Tensor]:
        """The starts with ``(t + offset) % stride == 0``, and their indices, int64 ``[M]``."""
        columns = torch.arange(self.width, device=self.flat.device)
        regular = (columns + offset) % stride == 0
        return DraftStarts(self._starts & regular), regular[self.position].nonzero()[:, 0]

    @cached_property
    def future_keys(self) -> torch.Tensor:
        """The tokens after a draft's start, which it must not see: bool ``[B, 1, 1, R, W]``."""
        last = self.flat.new_zeros(self.windows * self.longest)
        last = last.index_copy(0, self.padded, self.position)
        keys = torch.arange(self.width, device=last.device)
        return keys > last.view(self.windows, 1, 1, self.longest, 1)

    def index_ahead(self, count: int) -> torch.Tensor:
        """The flat index of t + count, limited to the same sequence: int64 [N]."""
        return self.flat + (self.width - 1 - self.position).clamp(max=count)

    def in_window(self, count: int) -> torch.Tensor:
        """Whether t + count is in the sequence: bool [N]."""
        return self.position + count < self.width


class DraftAttention:
    """Attention of N drafts of ``size`` rows each. A draft attends to the tokens of its sequence up
    to its start, and to its own rows (with ``causal`` not to later ones).

    ``context`` has the keys and values of the tokens for each layer, ``[1, kv_heads, B * W, d]``.
    Without it, a layer's first call provides them: its queries are those of ``starts``, or of all
    tokens, and attend only to the tokens. Later queries, of the drafts ``then``, also attend to
    their rows of earlier calls.

    On a CPU, matrix products and a softmax in the head's dtype are several times as fast as torch's
    fused attention."""

    def __init__(
        self,
        starts: DraftStarts,
        then: DraftStarts | None = None,
        context: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        size: int = 1,
        causal: bool = False,
    ) -> None:
        self._starts, self._then = starts, then or starts
        self._context, self._size, self._causal = dict(enumerate(context)), size, causal
        self._drafted: dict[int, list[torch.Tensor]] = {}  # keys and values of drafts, by layer

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """Attention for ``N * size`` rows, with the signature of ``Attend``."""
        starts, size, width = self._then, self._size, query.shape[-1]
        if layer not in self._context:
            starts = self._starts
            if query.shape[2] > len(starts.flat):  # a layer below the last one
                starts = self._all_tokens
        windows, heads, kv_heads = starts.windows, query.shape[1], key.shape[1]
        rows = self._table(starts, query[0] * scaling)
        q = rows.view(windows, kv_heads, -1, starts.longest, size, width)
        if layer in self._context:  # [windows, kv_heads, R, rows so far, d]
            tables = [self._table(starts, key[0]), self._table(starts, value[0])]
            before = self._drafted.get(layer, [tables[0][..., :0, :]] * 2)
            drafted = [torch.cat(pair, 3) for pair in zip(before, tables, strict=True)]
            self._drafted[layer] = drafted
        else:
            drafted = [q[:, :, 0, :, :0]] * 2
            self._context[layer] = key, value
        k, v = (
            part[0].reshape(kv_heads, windows, -1, width).transpose(0, 1)
            for part in self._context[layer]
        )
        scores = (q.flatten(2, 4) @ k.transpose(-1, -2)).view(*q.shape[:-1], -1)
        scores = scores.masked_fill_(starts.future_keys.unsqueeze(4), float("-inf"))
        of_drafts = q.transpose(2, 3)  # query heads that share keys become rows of one product
        within = of_drafts.flatten(3, 4) @ drafted[0].transpose(-1, -2)
        within = within.view(*of_drafts.shape[:-1], -1).transpose(2, 3)
        if self._causal:
            later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
            within = within.masked_fill(later, float("-inf"))
        weights = torch.cat((scores, within), -1).softmax(-1)
        count = scores.shape[-1]
        out = (weights[..., :count].flatten(2, 4) @ v).view(q.shape)
        chosen = weights[..., count:].transpose(2, 3).flatten(3, 4) @ drafted[1]
        out = out + chosen.view(of_drafts.shape).transpose(2, 3)
        out = out.view(windows, heads, starts.longest, size, width).permute(0, 2, 3, 1, 4)
        result: torch.Tensor = out.flatten(0, 1)[starts.padded]
        return result.flatten(0, 1)[None]

    @cached_property
    def _all_tokens(self) -> DraftStarts:
        """All positions: the queries of a layer below the last one, over the text."""
        shape = self._starts.windows, self._starts.width
        return DraftStarts(torch.ones(shape, dtype=torch.bool, device=self._starts.flat.device))

    def _table(self, starts: DraftStarts, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[heads, N * size, d]`` as ``[windows, heads, R, size, d]``, padded with zeros."""
        heads, _, width = rows.shape
        table = rows.new_zeros(starts.windows * starts.longest, heads, self._size, width)
        drafts = rows.view(heads, -1, self._size, width).transpose(0, 1)
        table = table.index_copy(0, starts.padded, drafts)
        return table.view(starts.windows, starts.longest, *table.shape[1:]).transpose(1, 2)


def loss_at_offset(
    starts: DraftStarts,
    count: int,
    loss_mask: torch.Tensor,
    logits: torch.Tensor,
    probs: torch.Tensor,
    row_of: torch.Tensor,
    tv_weight: float = 0.0,
) -> torch.Tensor:
    """The mean loss of the drafts' predictions ``logits [N, V]`` of token t + 2 + ``count``, where
    that is in the loss mask (bool ``[B * W]``). ``probs [M, V]`` are the target's distributions,
    ``row_of [B * W]`` the row in them for the next token of each position. ``tv_weight`` as in
    ``distribution_loss``."""
    counted = starts.in_window(2 + count) & loss_mask[starts.index_ahead(2 + count)]
    index = row_of[starts.index_ahead(1 + count)]
    return distribution_loss(logits, probs, index, counted.float() / len(counted), tv_weight)


# PARD's conditional drop: the share of masks kept per further draft position, and its minimum.
_KEPT, _MIN_KEPT = 0.7, 0.2


class MaskedRows(NamedTuple):
    """R rows of input: the tokens of a text, then mask tokens. A mask of depth d for position t has
    position t + d, and attends to the text up to t and to the masks of lower depth for t.
    ``positions`` and ``depths`` int64 ``[R]``, ``attention_mask`` bool ``[R, R]``."""

    token: int
    positions: torch.Tensor
    depths: torch.Tensor
    attention_mask: torch.Tensor

    @classmethod
    def of(
        cls,
        token: int,
        width: int,
        count: int,
        first: int = 0,
        generator: torch.Generator | None = None,
    ) -> MaskedRows:
        """Masks for drafts of ``count`` tokens after the positions from ``first`` on that have as
        many tokens after them, in a text of ``width`` tokens. With a ``generator`` masks are
        dropped at random, more of them at greater depth."""
        positions = torch.arange(first, max(first, width - count + 1))
        starts, total = [torch.arange(width)], len(positions)
        for depth in range(1, count):
            if generator is not None:
                kept = int(total * max(_KEPT**depth, _MIN_KEPT))
                positions = positions[torch.randperm(len(positions), generator=generator)[:kept]]
                positions = positions.sort().values
            starts.append(positions)
        start = torch.cat(starts)
        depths = torch.cat([torch.full_like(part, n) for n, part in enumerate(starts)])
        text = (depths == 0) & (start <= start[:, None])
        chain = (start == start[:, None]) & (depths <= depths[:, None])
        return cls(token, start + depths, depths, text | chain)

    def inputs(self, ids: torch.Tensor) -> dict[str, Any]:
        """The inputs of a module of transformers for texts ``[B, width]``."""
        masks = len(self.positions) - ids.shape[1]
        return {
            "input_ids": F.pad(ids, (0, masks), value=self.token),
            "attention_mask": self.attention_mask.to(ids.device)[None, None],
            "position_ids": self.positions.to(ids.device)[None],
        }

    def reach_probs(self, log_probs: torch.Tensor) -> torch.Tensor:
        """The chance ``[B, R]`` that a draft of the text itself is accepted up to each row: a mask
        behind a token that the target would hardly write is hardly ever reached (PARD-2, An et al.
        2026, arXiv 2605.08632). ``log_probs [B, width]``: the target's, of each token after those
        before it."""
        total = log_probs.cumsum(1)
        return (total[:, self.positions] - total[:, self.positions - self.depths]).exp()

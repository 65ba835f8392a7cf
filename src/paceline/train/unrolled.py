"""An EAGLE head unrolled over its drafting steps (training-time test: Li et al. 2025,
arXiv 2503.01840, section 3), from the positions of windows whose next tokens are to be learnt."""

from __future__ import annotations

from functools import cached_property

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
        """Those whose position plus ``offset`` is a multiple of ``stride``, and which they are,
        int64 ``[M]``."""
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


class UnrolledAttention:
    """Attention of a head over windows (the first call) and then over the drafts' own steps.

    Row n of step j, drafted token j of draft n, attends to the keys of step 0 up to where the draft
    starts (the committed tokens) and to its own keys of the steps 1 to j. The first call has keys
    and values of all rows of the windows, queries of ``starts`` only; further ones are of ``then``.

    Products and a softmax in the head's dtype are, on a processor, several times as fast as torch's
    fused attention.
    """

    def __init__(self, starts: DraftStarts, then: DraftStarts | None = None) -> None:
        self._starts, self._then = starts, then or starts
        self._committed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._drafted: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """As ``Attend`` of the lean forward; first over the windows, then over the drafts."""
        heads, _, width = query.shape[1:]
        starts, kv_heads, windows = self._starts, key.shape[1], self._starts.windows
        q = self._table(query[0] * scaling).view(windows, kv_heads, -1, starts.longest, width)
        if self._committed is None:
            k, v = (
                tensor[0].reshape(kv_heads, windows, -1, width).transpose(0, 1)
                for tensor in (key, value)
            )
            self._committed, self._starts = (k, v), self._then
        else:
            self._drafted.append((self._table(key[0]), self._table(value[0])))
        out = self._over(q, starts.unseen, *self._committed)
        out = out.view(windows, heads, starts.longest, width).transpose(1, 2)
        return out.reshape(-1, heads, width)[starts.padded][None]

    def _table(self, rows: torch.Tensor) -> torch.Tensor:
        """``[heads, N, d]`` as ``[windows, heads, R, d]``, zeros where a window has fewer."""
        starts = self._starts
        heads, _, width = rows.shape
        table = rows.new_zeros(starts.windows * starts.longest, heads, width)
        table = table.index_copy(0, starts.padded, rows.transpose(0, 1))
        table = table.view(starts.windows, starts.longest, heads, width)
        return table.transpose(1, 2).contiguous()

    def _over(
        self, q: torch.Tensor, unseen: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Of ``[windows, kv_heads, group, R, d]`` over the committed tokens and, of each row, its
        own steps so far."""
        rows, count = q.flatten(2, 3), k.shape[2]
        scores = (rows @ k.transpose(-1, -2)).view(*q.shape[:-1], count)
        scores = scores.masked_fill_(unseen, float("-inf"))
        drafted = [(q * key[:, :, None]).sum(-1, keepdim=True) for key, _ in self._drafted]
        weights = torch.cat((scores, *drafted), -1).softmax(-1)
        out = (weights[..., :count].flatten(2, 3) @ v).view(q.shape)
        for index, (_, value) in enumerate(self._drafted, count):
            out = out + weights[..., index, None] * value[:, :, None]
        return out


def loss_ahead(
    starts: DraftStarts,
    count: int,
    learn: torch.Tensor,
    logits: torch.Tensor,
    probs: torch.Tensor,
    row_of: torch.Tensor,
    eta: float = 0.0,
) -> torch.Tensor:
    """Mean over the drafts of the loss of ``logits [N, V]`` about token t + 2 + ``count``, where
    that is to be learnt (``learn`` bool ``[B * W]``).

    ``probs [M, V]`` are what the target says, ``row_of [B * W]`` which of them about a
    position's next token; ``eta`` as in ``distribution_loss``.
    """
    wanted = starts.inside(2 + count) & learn[starts.ahead(2 + count)]
    index = row_of[starts.ahead(1 + count)]
    return distribution_loss(logits, probs, index, wanted.float() / len(wanted), eta)

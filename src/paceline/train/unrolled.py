"""An EAGLE head unrolled over its drafting steps, from chosen places of several windows at once.

Training-time test (Li et al. 2025, arXiv 2503.01840, section 3): the head is trained on its own
hidden states, as in drafting. Only places whose next tokens are to be learnt are unrolled; the
others, such as a prompt's, are read once, because later places attend to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from paceline.train.losses import soft_cross_entropy


@dataclass(frozen=True)
class DraftStarts:
    """Where drafts start in windows ``[B, W]``: N places, packed.

    A draft from place t reads the features up to t and token t + 1 and is about t + 2, t + 3, ...
    ``flat[n]`` is ``window * W + t``; ``padded[n]`` its number in a table ``[B, R]`` that has a
    line for every window.
    """

    windows: int
    width: int
    longest: int  # R
    flat: torch.Tensor  # int64 [N]
    padded: torch.Tensor  # int64 [N]

    @classmethod
    def of(cls, learn: torch.Tensor) -> DraftStarts:
        """Of the tokens to be learnt, bool ``[B, W]``: every place whose t + 2 is one of them."""
        return cls.at(F.pad(learn[:, 2:], (0, 2)))

    @classmethod
    def at(cls, starts: torch.Tensor) -> DraftStarts:
        """Where ``starts``, bool ``[B, W]``, says so."""
        windows, width = starts.shape
        window, position = starts.nonzero(as_tuple=True)
        order = (starts.cumsum(1) - 1)[window, position]
        longest = int(starts.sum(1).max()) if starts.numel() else 0
        return cls(windows, width, longest, window * width + position, window * longest + order)

    def every(self, stride: int, offset: int) -> tuple[DraftStarts, torch.Tensor]:
        """Those whose position plus ``offset`` is a multiple of ``stride``, and which they are,
        int64 ``[M]``."""
        kept = ((self.position + offset) % stride == 0).nonzero()[:, 0]
        starts = torch.zeros(self.windows * self.width, dtype=torch.bool, device=kept.device)
        starts[self.flat[kept]] = True
        return DraftStarts.at(starts.view(self.windows, self.width)), kept

    @property
    def position(self) -> torch.Tensor:
        """int64 [N]: t."""
        return self.flat % self.width

    def ahead(self, count: int) -> torch.Tensor:
        """int64 [N]: the flat number of t + count, clamped to the place's own window."""
        return self.flat + torch.minimum(
            torch.full_like(self.flat, count), self.width - 1 - self.position
        )

    def inside(self, count: int) -> torch.Tensor:
        """bool [N]: whether t + count lies in the window."""
        return self.position + count < self.width


class UnrolledAttention:
    """Attention of a head over windows (the first call) and then over the drafts' own steps.

    Row n of step j stands for the drafted token j of the draft that starts at place n. It attends
    to the keys of step 0 up to its place (the committed tokens) and to its own keys of the steps
    1 to j, as it would with a cache. The first call has keys and values of all rows of the
    windows, queries of ``places`` only; further ones may be of other, fewer places (``then``).

    Scores are products and a softmax in the head's dtype: on a processor several times as fast as
    the fused attention of torch.
    """

    def __init__(self, places: DraftStarts, then: DraftStarts | None = None) -> None:
        self._places, self._then = places, then or places
        self._committed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        layer: int,
        scaling: float,
    ) -> torch.Tensor:
        """As ``Attend`` of the lean forward; first over the windows, then over the places."""
        heads, _, width = query.shape[1:]
        kv_heads, windows = key.shape[1], self._places.windows
        places = self._places
        q = self._table(query[0] * scaling).view(windows, kv_heads, -1, places.longest, width)
        if self._committed is None:
            k, v = (
                tensor[0].reshape(kv_heads, windows, -1, width).transpose(0, 1)
                for tensor in (key, value)
            )
            self._committed = k, v
            self._unseen, self._places = self._unseen_by(places), self._then
        else:
            if len(self._own) == 0:
                self._unseen = self._unseen_by(places)
            self._own.append((self._table(key[0]), self._table(value[0])))
        out = self._over(q, *self._committed).view(windows, heads, places.longest, width)
        return out.transpose(1, 2).reshape(-1, heads, width)[places.padded][None]

    def _table(self, rows: torch.Tensor) -> torch.Tensor:
        """``[heads, N, d]`` as ``[windows, heads, R, d]``, zeros where a window has fewer."""
        places = self._places
        heads, _, width = rows.shape
        table = rows.new_zeros(places.windows * places.longest, heads, width)
        table = table.index_copy(0, places.padded, rows.transpose(0, 1))
        table = table.view(places.windows, places.longest, heads, width)
        return table.transpose(1, 2).contiguous()

    def _unseen_by(self, places: DraftStarts) -> torch.Tensor:
        """bool ``[windows, 1, 1, R, W]``: committed tokens that a place does not see."""
        last = places.flat.new_zeros(places.windows * places.longest)
        last = last.index_copy(0, places.padded, places.position)
        keys = torch.arange(places.width, device=last.device)
        return keys > last.view(places.windows, 1, 1, places.longest, 1)

    def _over(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Of ``[windows, kv_heads, group, R, d]`` over the committed tokens and, of each row, its
        own steps so far."""
        rows, count = q.flatten(2, 3), k.shape[2]
        scores = (rows @ k.transpose(-1, -2)).view(*q.shape[:-1], count)
        scores = scores.masked_fill_(self._unseen, float("-inf"))
        own_scores = [(q * own_k[:, :, None]).sum(-1, keepdim=True) for own_k, _ in self._own]
        weights = torch.cat((scores, *own_scores), -1).softmax(-1)
        out = (weights[..., :count].flatten(2, 3) @ v).view(q.shape)
        for index, (_, own_v) in enumerate(self._own, count):
            out = out + weights[..., index, None] * own_v[:, :, None]
        return out


def loss_ahead(
    places: DraftStarts,
    count: int,
    learn: torch.Tensor,
    logits: torch.Tensor,
    probs: torch.Tensor,
    row_of: torch.Tensor,
) -> torch.Tensor:
    """Mean over the places of the loss of ``logits [N, V]`` about token t + 2 + ``count``, where
    that is to be learnt (``learn`` bool ``[B * W]``).

    ``probs [M, V]`` are what the target says, ``row_of [B * W]`` which of them about a place's
    next token.
    """
    wanted = places.inside(2 + count) & learn[places.ahead(2 + count)]
    index = row_of[places.ahead(1 + count)]
    return soft_cross_entropy(logits, probs, index, wanted.float() / len(wanted))

"""Logits over some of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Narrow:
    """Logits ``[R, n]`` of the tokens ``ids`` alone, int64 ``[n]``, ascending; no other of the
    ``vocab`` is likely.

    Enough where the request's choice is the largest logit (``is_plain_greedy``). Of 49,152 tokens a
    head knows 8,192: all that is done with a row costs a sixth.
    """

    logits: torch.Tensor
    ids: torch.Tensor
    vocab: int

    def whole(self) -> torch.Tensor:
        """``[R, vocab]``, minus infinity for the others."""
        return widened(self.logits, self.ids, self.vocab)


def widened(logits: torch.Tensor, ids: torch.Tensor, width: int) -> torch.Tensor:
    """``[..., n]`` of the tokens ``ids`` over ``width`` tokens, minus infinity for the others."""
    full = logits.new_full((*logits.shape[:-1], width), -torch.inf)
    return full.index_copy_(-1, ids, logits)


Logits = torch.Tensor | Narrow  # [R, vocab], or of some tokens

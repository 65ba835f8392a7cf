"""What training sees of the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Observed:
    """What the target says about windows of text ``ids [B, W]``.

    ``learn`` bool ``[B, W]``: the tokens that a head shall learn to draft. ``embeds
    [B, W, hidden]``, ``features [B, W, layers * hidden]`` (side by side), ``final
    [B, W, hidden]``, the output of the final norm, and ``logits [B, W, vocab]``, or None where
    they are the head's product with ``final`` and are made for the rows that are asked for.
    """

    ids: torch.Tensor
    learn: torch.Tensor
    embeds: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor
    logits: torch.Tensor | None

"""What training sees of the target."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Observed:
    """What the target says about windows of text ``ids [B, W]``.

    ``embeds [B, W, hidden]``, ``features [B, W, layers * hidden]`` (side by side),
    ``logits [B, W, vocab]`` and ``final [B, W, hidden]``, the output of the final norm.
    """

    ids: torch.Tensor
    embeds: torch.Tensor
    features: torch.Tensor
    logits: torch.Tensor
    final: torch.Tensor

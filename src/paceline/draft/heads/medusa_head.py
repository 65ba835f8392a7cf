"""Medusa heads: each predicts one of the tokens that follow the target's next one.

Cai et al. 2024 (arXiv 2401.10774), section 3.1. Head k sees the target's last hidden state at
position t (the final norm's output) and predicts token t + 2 + k, as the target itself predicts
token t + 1: residual blocks ``x + SiLU(Linear(x))``, then a linear layer to the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from paceline.draft.trees.grow import widened

Head = Callable[[torch.Tensor], torch.Tensor]  # hidden [..., width] -> logits [..., vocab]


@dataclass(frozen=True)
class MedusaConfig:
    """The shape of the heads, and how often they were right.

    ``shared_head``: all heads use the target's language-model head instead of a vocabulary layer
    each. ``draft_vocab_size``: below ``vocab_size``, they know only the tokens of the token map.
    ``accuracy[k][r]``: how often candidate r of head k was right on held-out text, if measured.
    """

    hidden_size: int
    vocab_size: int
    heads: int = 4
    layers: int = 1
    bias: bool = True
    shared_head: bool = False
    draft_vocab_size: int | None = None
    base_model: str | None = None
    accuracy: tuple[tuple[float, ...], ...] = ()

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size not in (None, self.vocab_size)

    @property
    def head_rows(self) -> int:
        """Rows of a head's own vocabulary layer."""
        return self.draft_vocab_size or self.vocab_size


class ResidualBlock(nn.Module):
    """``x + SiLU(Linear(x))``; starts as the identity."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=bias)
        nn.init.zeros_(self.linear.weight)
        if bias:
            nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """All heads. Parameter names are those of the public checkpoints: ``{head}.{layer}.linear.*``
    for the blocks and ``{head}.{layers}.weight`` for the vocabulary layer."""

    token_map: torch.Tensor | None

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        for _ in range(config.heads):
            head: list[nn.Module] = [
                ResidualBlock(width, config.bias) for _ in range(config.layers)
            ]
            if not config.shared_head:
                head.append(nn.Linear(width, config.head_rows, bias=False))
            self.append(nn.Sequential(*head))
        ids = torch.arange(config.head_rows) if config.reduced else None
        self.register_buffer("token_map", ids)

    def vocabulary_layers(self) -> list[nn.Linear]:
        """The heads' own vocabulary layers; none where they share the target's."""
        if self.config.shared_head:
            return []
        heads = [self.get_submodule(f"{head}.{self.config.layers}") for head in range(len(self))]
        return [module for module in heads if isinstance(module, nn.Linear)]

    def forward(self, features: torch.Tensor, lm_head: Head | None = None) -> torch.Tensor:
        """Logits ``[heads, T, vocab]`` from the target's final hidden states ``[T, width]``, minus
        infinity outside a reduced vocabulary. ``lm_head``: the target's, where they share it."""
        return torch.stack([self.logits(k, features, lm_head) for k in range(len(self))])

    def logits(
        self, head: int, features: torch.Tensor, lm_head: Head | None = None
    ) -> torch.Tensor:
        """Logits ``[T, vocab]`` of one head."""
        output: torch.Tensor = self[head](features)
        if self.config.shared_head:
            assert lm_head is not None, "these heads use the target's language-model head"
            output = lm_head(output)
        return self.spread(output)

    def spread(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary, minus infinity for tokens that the heads do not
        know."""
        if self.token_map is None:
            return logits
        if self.config.shared_head:  # the target's head knows more tokens than were trained on
            logits = logits.index_select(-1, self.token_map)
        return widened(logits, self.token_map, self.config.vocab_size)

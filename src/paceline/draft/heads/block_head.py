"""The network of block drafters: a few layers draft a whole block of tokens in one pass.

DFlash (arXiv 2602.06036): the rows of a block are the last committed token (the anchor) and masks.
They see each other, and the target's fused features of the text before the anchor, which every
layer turns into keys and values. JetSpec (arXiv 2606.18394) is the same with rows that see none
behind them, which makes better trees. DSpark (arXiv 2607.05147) adds to each row's logits a bias
that follows from the token before it, of low rank, and predicts how likely its draft is accepted::

    position              0 ... n-2        n-1      n      n+1
    keys and values       f0 ... f_n-2     anchor   mask   mask     see all before and each other
    drafts, DFlash                                  x_n    x_n+1
    drafts, from_anchor                    x_n      x_n+1  x_n+2

Parameter names are those of the public checkpoints::

    fc  hidden_norm  norm  [embed_tokens]  [lm_head]
    layers.N.{input_layernorm,self_attn,post_attention_layernorm,mlp}
    markov_head.{markov_w1,markov_w2,[gate_proj]}  confidence_head.proj
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.draft.heads.network import AttendingHead, HeadConfig, HeadLayer
from paceline.model.backends.base import Attend

MARKOV = "vanilla", "gated"


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HeadConfig):
    """Shape of a head, which is as wide as its target. ``from_anchor``: the anchor's row drafts,
    too. ``causal``: rows see none behind them. ``markov_rank``: of the bias by the token before, 0
    for none."""

    layers: int
    block_size: int
    mask_token: int
    from_anchor: bool = False
    causal: bool = False
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False

    def _problem(self) -> str | None:
        if not 0 <= self.mask_token < self.vocab_size:
            return f"the mask token {self.mask_token} is not one of {self.vocab_size} tokens"
        if self.block_size < 2:
            return f"a block of {self.block_size} drafts nothing; use at least 2"
        if self.markov_rank and self.markov_type not in MARKOV:
            known = " and ".join(MARKOV)
            return f"a markov head of type {self.markov_type!r} is not supported; {known} are"
        return super()._problem()

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


class _Markov(nn.Module):
    """The bias of logits by the token before: ``W2 W1[token]``, with a gate by the row's output."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.columns, bias=False)
        if config.markov_type == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)

    def forward(self, known: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
        """``known [..., rank]``: ``markov_w1`` of the tokens before; ``outputs [..., hidden]``."""
        if hasattr(self, "gate_proj"):
            known = torch.sigmoid(self.gate_proj(torch.cat((outputs, known), -1))) * known
        return self.markov_w2(known)  # type: ignore[no-any-return]


class _Confidence(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class BlockHead(AttendingHead):
    """Weights and forward of a head, for training and drafting."""

    def __init__(self, config: BlockConfig, draft_ids: torch.Tensor | None = None) -> None:
        super().__init__(config)
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList(
            HeadLayer(config, ("input_layernorm",), size, normed=True) for _ in range(config.layers)
        )
        self.norm = nn.RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.columns, bias=False) if config.has_lm_head else None
        self.markov_head = _Markov(config) if config.markov_rank else None
        with_markov = config.markov_rank if config.confidence_with_markov else 0
        self.confidence_head = _Confidence(size + with_markov) if config.confidence else None
        if config.reduced:
            self.register_vocabulary(config, draft_ids)
        else:
            self.register_buffer("draft_ids", None)

    def context(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values ``[1, kv_heads, T, width]`` of features ``[T, layers *
        hidden]`` at ``positions [T]``."""
        fused = self.hidden_norm(self.fc(features))
        angles = self.angles(positions, self.norm.weight)
        for layer in self.layers:
            attention: Any = layer.self_attn
            yield attention.keys_values(fused, angles)

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Rows of blocks ``[T, hidden]`` at ``positions [T]`` to normed outputs ``[T, hidden]``."""
        angles = self.angles(positions, self.norm.weight)
        for number, layer in enumerate(self.layers):
            attended: Any = layer.input_layernorm
            embeds = layer(attended(embeds), embeds, angles, attend, number)
        outputs: torch.Tensor = self.norm(embeds)
        return outputs

    def bias(self, outputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor | None:
        """Of logits ``[..., columns]`` by the tokens ``before`` int64 ``[...]``; None if it has
        none."""
        if self.markov_head is None:
            return None
        bias: torch.Tensor = self.markov_head(self.markov_head.markov_w1(before), outputs)
        return bias

    def confidence(self, outputs: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Logit of the chance that a row's draft is accepted, ``[...]``."""
        assert self.confidence_head is not None
        if self.config.confidence_with_markov:
            assert self.markov_head is not None
            outputs = torch.cat((outputs, self.markov_head.markov_w1(before)), -1)
        chance: torch.Tensor = self.confidence_head.proj(outputs)
        return chance.squeeze(-1)

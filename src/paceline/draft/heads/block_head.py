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

from paceline.draft.heads.eagle_head import SIZES, rotate
from paceline.errors import ConfigError
from paceline.model.backends.base import Attend

MARKOV = "vanilla", "gated"


@dataclass(frozen=True)
class BlockConfig:
    """Shape of a head, which is as wide as its target. ``feature_layers``: layers of the target
    whose inputs it reads; ``target_layers`` there means the final norm's output. ``from_anchor``:
    the anchor's row drafts, too. ``causal``: rows see none behind them. ``markov_rank``: of the
    bias by the token before, 0 for none."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    layers: int
    vocab_size: int
    target_layers: int
    feature_layers: tuple[int, ...]
    block_size: int
    mask_token: int
    max_positions: int
    from_anchor: bool = False
    causal: bool = False
    draft_vocab_size: int | None = None  # None: all of the target's
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = False
    has_embedding: bool = False  # otherwise the target's is used
    has_lm_head: bool = False

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ConfigError(problem)

    def _problem(self) -> str | None:
        last = self.target_layers
        wrong = [n for n in self.feature_layers if not 0 <= n <= last]
        if not self.feature_layers or wrong:
            known = f"layers 0 to {last - 1}, and {last} means the final norm's output"
            return f"feature layers {wrong} do not exist: the target has {known}"
        if self.heads % self.kv_heads:
            return f"{self.heads} heads cannot share {self.kv_heads} key-value heads"
        if not 0 <= self.mask_token < self.vocab_size:
            return f"the mask token {self.mask_token} is not one of {self.vocab_size} tokens"
        if self.block_size < 2:
            return f"a block of {self.block_size} drafts nothing; use at least 2"
        if self.markov_rank and self.markov_type not in MARKOV:
            known = " and ".join(MARKOV)
            return f"a markov head of type {self.markov_type!r} is not supported; {known} are"
        if self.reduced and not self.has_lm_head:
            return f"it drafts {self.draft_vocab_size} of {self.vocab_size} tokens without lm_head"
        return None

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size not in (None, self.vocab_size)

    @property
    def columns(self) -> int:
        """Of the logits."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def drafts(self) -> int:
        """Tokens that a block drafts."""
        return self.block_size if self.from_anchor else self.block_size - 1


def qwen3(config: BlockConfig) -> Any:
    """transformers' config for its modules."""
    from transformers import Qwen3Config

    rope = {"rope_type": "default", "rope_theta": config.rope_theta, **(config.rope_scaling or {})}
    sizes = {option: getattr(config, name) for option, name in SIZES.items()}
    return Qwen3Config(**sizes, rope_parameters=rope)


class _Attention(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.width = width
        self.q_proj = nn.Linear(size, config.heads * width, bias=bias)
        self.k_proj = nn.Linear(size, config.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(size, config.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.heads * width, size, bias=bias)
        self.q_norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(width, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Of rows ``x [T, hidden]``: ``[1, kv_heads, T, width]`` each."""
        keys = self.k_norm(self._by_head(self.k_proj(x)))
        values = self._by_head(self.v_proj(x))
        return rotate(keys, *angles).transpose(0, 1)[None], values.transpose(0, 1)[None]

    def forward(self, x: torch.Tensor, angles: Angles, attend: Attend, layer: int) -> torch.Tensor:
        query = rotate(self.q_norm(self._by_head(self.q_proj(x))), *angles).transpose(0, 1)[None]
        keys, values = self.keys_values(x, angles)
        out = attend(query, keys, values, layer=layer, scaling=self.width**-0.5)
        return self.o_proj(out.reshape(len(x), -1))  # type: ignore[no-any-return]

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self.width)


Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [T, 1, width]


class _Layer(nn.Module):
    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = Qwen3MLP(qwen3(config))

    def forward(self, x: torch.Tensor, angles: Angles, attend: Attend, layer: int) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend, layer)
        update: torch.Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + update


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


class BlockHead(nn.Module):
    """Weights and forward of a head, for training and drafting. ``draft_ids``: target ids that it
    can draft, int64, ascending; None for all."""

    draft_ids: torch.Tensor | None
    rotary: Any

    def __init__(self, config: BlockConfig, draft_ids: torch.Tensor | None = None) -> None:
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.feature_layers) * size, size, bias=False)
        self.hidden_norm = nn.RMSNorm(size, eps)
        self.layers = nn.ModuleList([_Layer(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(size, eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.has_embedding else None
        self.lm_head = nn.Linear(size, config.columns, bias=False) if config.has_lm_head else None
        self.markov_head = _Markov(config) if config.markov_rank else None
        with_markov = config.markov_rank if config.confidence_with_markov else 0
        self.confidence_head = _Confidence(size + with_markov) if config.confidence else None
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        # Not a submodule: it would be cast to the head's dtype, but angles are float32.
        self.__dict__["rotary"] = Qwen3RotaryEmbedding(qwen3(config))

    @property
    def cache_shapes(self) -> list[tuple[int, int, int]]:
        """Of each layer: key-value heads, and widths of a key and a value."""
        config = self.config
        return [(config.kv_heads, config.head_dim, config.head_dim)] * config.layers

    def angles(self, positions: torch.Tensor) -> Angles:
        """At ``positions [T]``."""
        like = self.norm.weight
        if self.rotary.inv_freq.device != like.device:  # as it is no submodule
            self.__dict__["rotary"] = self.rotary.to(like.device)
        cos, sin = (part[0][:, None] for part in self.rotary(like, positions[None]))
        return cos, sin

    def context(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values ``[1, kv_heads, T, width]`` of features ``[T, layers *
        hidden]`` at ``positions [T]``."""
        fused, angles = self.hidden_norm(self.fc(features)), self.angles(positions)
        for layer in self.layers:
            attention: Any = layer.self_attn
            yield attention.keys_values(fused, angles)

    def forward(
        self, embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Rows of blocks ``[T, hidden]`` at ``positions [T]`` to normed outputs ``[T, hidden]``."""
        angles = self.angles(positions)
        for number, layer in enumerate(self.layers):
            embeds = layer(embeds, angles, attend, number)
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

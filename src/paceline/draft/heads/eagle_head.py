"""The EAGLE head: one decoder layer that continues the target's features.

EAGLE (Li et al. 2024, arXiv 2401.15077), EAGLE-2 (2406.16858, the same weights) and EAGLE-3
(2503.01840). Row t takes the target's feature at position t and the embedding of token t + 1; its
logits are for token t + 2. When drafting, later rows take the head's own hidden output instead of a
feature. Parameter names are those of the public checkpoints::

    EAGLE-3    fc  midlayer.{hidden_norm,input_layernorm,self_attn,post_attention_layernorm,mlp}
               norm  lm_head  d2t  t2d  [embed_tokens]
    EAGLE-1/2  fc  layers.0.{self_attn,post_attention_layernorm,mlp}  [embed_tokens]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.model.backends.base import Attend

# Sizes: option of config.json -> field of EagleConfig.
SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
}


@dataclass(frozen=True)
class EagleConfig:
    """Shape of a head. Sizes in elements; ``feature_layers``: layers of the target whose inputs it
    reads; ``target_layers`` there means the final norm's output."""

    version: int  # 1 (also EAGLE-2) or 3
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int  # of the target
    target_hidden_size: int
    target_layers: int
    feature_layers: tuple[int, ...]
    draft_vocab_size: int  # of the logits; version 1 has the target's
    max_positions: int
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # rope_type and its parameters, as in transformers
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False  # EAGLE-3: the residual starts behind hidden_norm
    has_embedding: bool = False  # otherwise the target's embedding is used
    has_lm_head: bool = True  # EAGLE-3; otherwise the target's head is used

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ConfigError(problem)

    def _problem(self) -> str | None:
        if self.version not in (1, 3):
            return f"EAGLE version {self.version} is unknown; use 1 (also for 2) or 3"
        if not self.feature_layers:
            return "an EAGLE head needs at least one feature layer of the target"
        last = self.target_layers
        wrong = [n for n in self.feature_layers if not 0 <= n <= last]
        if wrong:
            known = (
                f"the target has layers 0 to {last - 1}, and {last} means the final norm's output"
            )
            return f"feature layers {wrong} do not exist: {known}"
        if self.heads % self.kv_heads:
            return f"{self.heads} heads cannot share {self.kv_heads} key-value heads"
        drafted, vocab = self.draft_vocab_size, self.vocab_size
        if drafted > vocab:
            return f"a draft vocabulary of {drafted} tokens exceeds the target's {vocab}"
        narrower = self.hidden_size != self.target_hidden_size
        if self.version == 3 and not self.has_lm_head and (drafted < vocab or narrower):
            return (
                f"it drafts {drafted} of {vocab} tokens but has no lm_head; the target's fits "
                "heads of its full vocabulary and width"
            )
        if self.version == 1 and (len(self.feature_layers) > 1 or narrower):
            return (
                "EAGLE-1 continues the feature of one target layer at the target's own width; "
                "use version 3 for several layers or another width"
            )
        if self.version == 1 and drafted < vocab:
            return "EAGLE-1 drafts with the target's head: no draft vocabulary"
        return None


def default_feature_layers(version: int, target_layers: int) -> tuple[int, ...]:
    """The layers of the papers: an early, a middle and a late one (3), the final output (1)."""
    if version == 1:
        return (target_layers,)
    early, late = min(2, target_layers), max(0, target_layers - 3)
    return (early, target_layers // 2, late)


def _llama(config: EagleConfig) -> Any:
    """transformers' config for its Llama modules."""
    from transformers import LlamaConfig

    rope = {"rope_type": "default", "rope_theta": config.rope_theta, **(config.rope_scaling or {})}
    sizes = {option: getattr(config, name) for option, name in SIZES.items()}
    return LlamaConfig(**sizes, rope_parameters=rope)


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, inputs: int) -> None:
        super().__init__()
        width, bias = config.head_dim, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, width
        self.q_proj = nn.Linear(inputs, config.heads * width, bias=bias)
        self.k_proj = nn.Linear(inputs, config.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(inputs, config.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.heads * width, config.hidden_size, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        only: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``x [T, inputs]``, ``cos`` and ``sin`` ``[T, 1, head_dim]`` to ``[T, hidden]``; with
        ``only [N]`` the outputs of those rows, ``[N, hidden]``."""
        rows, width = x.shape[0], self.head_dim
        k = rotate(self.k_proj(x).view(rows, self.kv_heads, width), cos, sin)
        v = self.v_proj(x).view(rows, self.kv_heads, width)
        if only is not None:
            x, cos, sin, rows = x[only], cos[only], sin[only], len(only)
        q = rotate(self.q_proj(x).view(rows, self.heads, width), cos, sin)
        q, k, v = (item.transpose(0, 1)[None] for item in (q, k, v))
        out = attend(q, k, v, layer=0, scaling=width**-0.5)
        return self.o_proj(out.reshape(rows, self.heads * width))  # type: ignore[no-any-return]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _Layer(nn.Module):
    """A decoder layer; version 3 attends from ``[norm(embedding), norm(hidden)]``, version 1 from
    the fused vector itself, without a norm."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaMLP

        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        if config.version == 3:
            self.input_layernorm = nn.RMSNorm(size, eps)
            self.hidden_norm = nn.RMSNorm(size, eps)
        self.self_attn = _Attention(config, 2 * size if config.version == 3 else size)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = LlamaMLP(_llama(config))

    def forward(
        self,
        embeds: torch.Tensor | None,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        only: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = hidden
        if embeds is not None:
            normed = self.hidden_norm(hidden)
            if self.norm_before_residual:
                hidden = normed
            x = torch.cat((self.input_layernorm(embeds), normed), -1)
        hidden = hidden if only is None else hidden[only]
        hidden = hidden + self.self_attn(x, cos, sin, attend, only)
        update: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + update


class EagleHead(nn.Module):
    """Weights and forward of a head, for training and drafting, in any dtype. ``draft_ids``: target
    ids it can draft, ascending; None for all. ``target_head`` maps ``[T, hidden]`` to logits ``[T,
    vocab]``, for version 1 and checkpoints without ``lm_head``."""

    target_head: Callable[[torch.Tensor], torch.Tensor] | None
    draft_ids: torch.Tensor
    d2t: torch.Tensor
    t2d: torch.Tensor
    rotary: Any

    def __init__(
        self,
        config: EagleConfig,
        draft_ids: Sequence[int] | None = None,
        target_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = config
        # Not a submodule: the target's weights are not part of the head.
        self.__dict__["target_head"] = target_head
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.has_embedding else None
        if config.version == 3:
            inputs = len(config.feature_layers) * config.target_hidden_size
            self.fc = nn.Linear(inputs, size, bias=config.fc_bias)
            self.midlayer = _Layer(config)
            self.norm = nn.RMSNorm(size, config.rms_norm_eps)
            if config.has_lm_head:
                self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            self._register_vocabulary(draft_ids)
        else:
            self.fc = nn.Linear(2 * size, size, bias=config.fc_bias)
            self.layers = nn.ModuleList([_Layer(config)])
        # Not a submodule: it would be cast to the head's dtype, but angles are float32.
        self.__dict__["rotary"] = LlamaRotaryEmbedding(_llama(config))

    def _register_vocabulary(self, draft_ids: Sequence[int] | None) -> None:
        count, vocab = self.config.draft_vocab_size, self.config.vocab_size
        # On the CPU even if the head is on the meta device: these values are read.
        ids = torch.tensor(list(range(count) if draft_ids is None else draft_ids), device="cpu")
        assert len(ids) == count and bool((ids.diff() > 0).all()), "as many ids, ascending"
        known = torch.zeros(vocab, dtype=torch.bool, device="cpu")
        known[ids] = True
        self.register_buffer("draft_ids", ids, persistent=False)
        self.register_buffer("d2t", ids - torch.arange(count, device="cpu"))
        self.register_buffer("t2d", known)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Key-value heads, and widths of a key and a value."""
        return (self.config.kv_heads, self.config.head_dim, self.config.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features ``[T, layers * target_hidden]`` as hidden states ``[T, H]``."""
        if self.config.version == 1:
            return features
        return self.fc(features)  # type: ignore[no-any-return]

    def forward(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        only: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Embeddings of the next tokens ``[T, H]`` and fused features or earlier outputs ``[T, H]``
        at ``positions [T]`` to hidden states ``[T, H]``; with ``only [N]`` those rows' ``[N, H]``.
        The output, before the final norm, is the next step's ``hidden``."""
        # As it is no submodule, ``to`` does not move it.
        if self.rotary.inv_freq.device != hidden.device:
            self.__dict__["rotary"] = self.rotary.to(hidden.device)
        cos, sin = (part[0][:, None] for part in self.rotary(hidden, positions[None]))
        out: torch.Tensor
        if self.config.version == 3:
            out = self.midlayer(embeds, hidden, cos, sin, attend, only)
        else:
            fused = self.fc(torch.cat((embeds, hidden), -1))
            out = self.layers[0](None, fused, cos, sin, attend, only)
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, draft_vocab]``: for the token after the embedded one."""
        if self.config.version == 3:
            hidden = self.norm(hidden)
            if self.config.has_lm_head:
                return self.lm_head(hidden)  # type: ignore[no-any-return]
        if self.target_head is None:
            raise ConfigError("this EAGLE head drafts with the target's head; give target_head")
        return self.target_head(hidden)

    def to_target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary ids, any shape, as ids of the target."""
        return ids + self.d2t[ids] if self.config.version == 3 else ids

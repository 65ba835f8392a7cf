"""Modules of EAGLE heads and block drafters: configuration, layers, draft vocabulary, RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.model.backends.base import Attend

# Option in config.json -> field of HeadShape.
SIZES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_positions",
}
Angles = tuple[torch.Tensor, torch.Tensor]  # cosines and sines of RoPE, [T, 1, head_dim] each


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """Shape of a head. ``feature_layers``: layers of the target whose inputs it reads; the number
    ``target_layers`` among them means the final norm's output. ``vocab_size`` is the target's,
    ``draft_vocab_size`` the width of the logits (None: the same). A head without an embedding or a
    language-model head uses the target's."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    target_layers: int
    feature_layers: tuple[int, ...]
    max_positions: int
    layers: int = 1
    draft_vocab_size: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None  # rope_type and its parameters, as in transformers
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    has_embedding: bool = False
    has_lm_head: bool = False

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem is not None:
            raise ConfigError(problem)

    def _problem(self) -> str | None:
        last = self.target_layers
        if not self.feature_layers:
            return "a head needs at least one feature layer of the target"
        wrong = [n for n in self.feature_layers if not 0 <= n <= last]
        if wrong:
            known = f"layers 0 to {last - 1}, and {last} means the final norm's output"
            return f"feature layers {wrong} do not exist: the target has {known}"
        if self.heads % self.kv_heads:
            return f"{self.heads} heads cannot share {self.kv_heads} key-value heads"
        if self.columns > self.vocab_size:
            return (
                f"a draft vocabulary of {self.columns} tokens exceeds the target's "
                f"{self.vocab_size}"
            )
        if self.reduced and not self.has_lm_head:
            return (
                f"it drafts {self.columns} of {self.vocab_size} tokens but has no lm_head; the "
                "target's fits heads of its full vocabulary"
            )
        return None

    @property
    def columns(self) -> int:
        """Width of the logits."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def reduced(self) -> bool:
        return self.columns != self.vocab_size

    @property
    def cache_shapes(self) -> list[tuple[int, int, int]]:
        """For each layer: number of key-value heads, widths of a key and of a value."""
        return [(self.kv_heads, self.head_dim, self.head_dim)] * self.layers


def _llama(config: HeadShape) -> Any:
    """The config for transformers' modules."""
    from transformers import LlamaConfig

    rope = {"rope_type": "default", "rope_theta": config.rope_theta, **(config.rope_scaling or {})}
    sizes = {option: getattr(config, name) for option, name in SIZES.items()}
    return LlamaConfig(**sizes, rope_parameters=rope)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class _Attention(nn.Module):
    """``inputs``: width of the input rows. ``normed`` (Qwen3): queries and keys are normalised, and
    the output projection has a bias if the other projections have."""

    def __init__(self, config: HeadShape, inputs: int, normed: bool) -> None:
        super().__init__()
        width, bias = config.head_dim, config.attention_bias
        self.width = width
        self.q_proj = nn.Linear(inputs, config.heads * width, bias=bias)
        self.k_proj = nn.Linear(inputs, config.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(inputs, config.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(config.heads * width, config.hidden_size, bias=bias and normed)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(width, config.rms_norm_eps) if normed else nn.Identity() for _ in range(2)
        )

    def keys_values(self, x: torch.Tensor, angles: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of rows ``x [T, inputs]``: ``[1, kv_heads, T, width]`` each."""
        keys = self.k_norm(self._by_head(self.k_proj(x)))
        values = self._by_head(self.v_proj(x))
        return _rotate(keys, *angles).transpose(0, 1)[None], values.transpose(0, 1)[None]

    def forward(
        self,
        x: torch.Tensor,
        angles: Angles,
        attend: Attend,
        layer: int,
        output_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x [T, inputs]`` to ``[T, hidden]``; with ``only [N]`` those rows' ``[N, hidden]``."""
        keys, values = self.keys_values(x, angles)
        if output_rows is not None:
            x, angles = x[output_rows], (angles[0][output_rows], angles[1][output_rows])
        query = _rotate(self.q_norm(self._by_head(self.q_proj(x))), *angles).transpose(0, 1)[None]
        out = attend(query, keys, values, layer=layer, scaling=self.width**-0.5)
        return self.o_proj(out[0].flatten(1))  # type: ignore[no-any-return]

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), x.shape[1] // self.width, self.width)


class HeadLayer(nn.Module):
    """A decoder layer. ``norms``: names of its input norms, which the head applies."""

    def __init__(
        self, config: HeadShape, norms: Sequence[str], inputs: int, normed: bool = False
    ) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaMLP

        size, eps = config.hidden_size, config.rms_norm_eps
        for name in norms:
            self.add_module(name, nn.RMSNorm(size, eps))
        self.self_attn = _Attention(config, inputs, normed)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = LlamaMLP(_llama(config))

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        angles: Angles,
        attend: Attend,
        layer: int = 0,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``x [T, inputs]`` and then the MLP, added to ``residual [T, hidden]``; with
        ``only [N]`` of those rows."""
        residual = residual if output_rows is None else residual[output_rows]
        hidden: torch.Tensor = residual + self.self_attn(x, angles, attend, layer, output_rows)
        update: torch.Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + update


class AttendingHead(nn.Module):
    """Base of heads made of ``HeadLayer``, in any dtype. ``draft_ids``: the target ids that it can
    draft, int64, ascending; None for all. Raises ConfigError for an unknown rotary embedding."""

    draft_ids: torch.Tensor | None
    d2t: torch.Tensor
    t2d: torch.Tensor
    rotary: Any

    def __init__(self, config: HeadShape) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        try:
            with torch.device("cpu"):  # even if the head is on the meta device
                rotary = LlamaRotaryEmbedding(_llama(config))
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"it has rope_scaling {config.rope_scaling}, which the installed transformers does "
                "not know or which is incomplete"
            ) from None
        # Not a submodule: it would be cast to the head's dtype, but angles are float32.
        self.__dict__["rotary"] = rotary
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, config.hidden_size) if config.has_embedding else None
        )

    def register_vocabulary(
        self, config: HeadShape, draft_ids: Sequence[int] | torch.Tensor | None
    ) -> None:
        """Register the draft vocabulary; ``draft_ids`` None: the first ``config.columns`` ids."""
        count = config.columns
        # On the CPU even if the head is on the meta device: these values are read.
        ids = torch.as_tensor(range(count) if draft_ids is None else draft_ids, device="cpu")
        assert len(ids) == count and bool((ids.diff() > 0).all()), "as many ids, ascending"
        known = torch.zeros(config.vocab_size, dtype=torch.bool, device="cpu")
        known[ids] = True
        self.register_buffer("draft_ids", ids, persistent=False)
        self.register_buffer("d2t", ids - torch.arange(count, device="cpu"))
        self.register_buffer("t2d", known)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def angles(self, positions: torch.Tensor, like: torch.Tensor) -> Angles:
        """RoPE at ``positions [T]``, on the device and in the dtype of ``like``."""
        if self.rotary.inv_freq.device != like.device:  # as it is no submodule, ``to`` leaves it
            self.__dict__["rotary"] = self.rotary.to(like.device)
        cos, sin = (part[0][:, None] for part in self.rotary(like, positions[None]))
        return cos, sin

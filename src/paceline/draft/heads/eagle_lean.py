"""The forward of an EAGLE head in few operations, as the reference backend has for whole models.

A head is one layer, so Python and small operations are most of what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from paceline.draft.heads.eagle_head import EagleConfig, EagleHead
from paceline.draft.vocabulary.shared import widened
from paceline.model.backends.base import Attend
from paceline.model.backends.reference.lean import LeanLayer, Residual, Rotary
from paceline.model.backends.reference.norms import RMSNorm
from paceline.model.backends.reference.prepack import prepack_modules
from paceline.model.backends.reference.products import Product, merged_product, product_of
from paceline.model.backends.reference.recognise import make_rotary


@dataclass(frozen=True)
class LeanEagle:
    """Stands for an EagleHead when drafting: the same methods, the same weights."""

    config: EagleConfig
    cache_shape: tuple[int, int, int]
    fc: Product
    hidden_norm: RMSNorm | None  # version 3
    layer: LeanLayer  # its input norm is that of the embeddings
    norm: RMSNorm | None  # version 3
    head: Product
    rotary: Rotary
    draft_ids: torch.Tensor | None  # int64 [draft_vocab]; None: the target's own ids

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See EagleHead."""
        return self.fc(features) if self.config.version == 3 else features

    def __call__(
        self,
        embeds: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
    ) -> torch.Tensor:
        """See EagleHead.forward."""
        layer = self.layer
        if self.hidden_norm is not None:
            normed = self.hidden_norm(hidden)
            x = torch.cat((layer.input_norm(embeds), normed), 1)
            stream = Residual(normed if self.config.norm_before_residual else hidden)
        else:
            x = self.fc(torch.cat((embeds, hidden), 1))
            stream = Residual(x)
        cos, sin = self.rotary(positions)
        stream.x.add_(layer.attention(x, stream.rows, 0, cos, sin, attend))
        layer.feed_forward(stream)
        return stream.x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See EagleHead."""
        return self.head(hidden if self.norm is None else self.norm(hidden))

    def expand(self, logits: torch.Tensor) -> torch.Tensor:
        """See EagleHead."""
        if self.draft_ids is None:
            return logits
        return widened(logits, self.draft_ids, self.config.vocab_size)


@torch.inference_mode()
def quicken(head: EagleHead, positions: int) -> LeanEagle:
    """Pack a head's weights, in place, and give it the short forward.

    ``positions`` is the longest context to expect. Nothing is compared here as for whole models:
    the modules are our own, and a draft that is off costs speed alone.
    """
    prepack_modules(head)
    config, third = head.config, head.config.version == 3
    module: Any = head.midlayer if third else head.layers[0]
    attention, mlp = module.self_attn, module.mlp
    mlp_norm = _norm(module.post_attention_layernorm)
    layer = LeanLayer(
        input_norm=_norm(module.input_layernorm) if third else mlp_norm,
        qkv=merged_product([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm=None,
        k_norm=None,
        out=product_of(attention.o_proj),
        mlp_norm=mlp_norm,
        gate_up=merged_product([mlp.gate_proj, mlp.up_proj]),
        down=product_of(mlp.down_proj),
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        scaling=config.head_dim**-0.5,
    )
    own_head = getattr(head, "lm_head", None)
    ids = None
    if config.draft_vocab_size < config.vocab_size:
        ids = head.to_target_ids(torch.arange(config.draft_vocab_size, device=head.d2t.device))
    longest = SimpleNamespace(max_position_embeddings=positions)
    return LeanEagle(
        config,
        head.cache_shape,
        product_of(head.fc),
        _norm(module.hidden_norm) if third else None,
        layer,
        _norm(head.norm) if own_head is not None else None,
        head.logits if own_head is None else product_of(own_head),
        make_rotary(head.rotary, longest, config.head_dim, mlp_norm.weight),
        ids,
    )


def _norm(module: Any) -> RMSNorm:
    weight = module.weight.detach()
    return RMSNorm(weight, torch.cat((weight, weight)), module.eps)

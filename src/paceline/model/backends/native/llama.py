"""Recognising decoders of Llama's shape, by structure and by results.

Nothing is believed from names alone: a layer of each kind is run in float32 on random input
against the formula, and embedding, final norm and head are compared with the model's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.model.backends.trial import relative_error
from paceline.model.quantised.weights import QuantisedLinear, is_plain

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


@dataclass(frozen=True)
class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32."""

    weight: torch.Tensor  # [width]
    eps: float

    @property
    def width(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same shape."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def as_rms_norm(module: nn.Module) -> RMSNorm | None:
    """The RMS norm that a module computes, found by comparing results, or None.

    Both ``weight * norm(x)`` and ``(1 + weight) * norm(x)``, with the sum in float32, are known.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if next(module.children(), None) is not None or getattr(module, "bias", None) is not None:
        return None
    weight = weight.detach()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator)
    # The scales tell a wrong epsilon, the offset a LayerNorm, from the true thing.
    x = x * torch.tensor([[1e-3], [0.05], [1.0], [30.0]]) + torch.tensor([[0.0], [0.0], [2.0], [0]])
    x = x.to(weight)
    with torch.inference_mode():
        try:
            wanted = module(x)
        except (RuntimeError, TypeError):  # takes other inputs: not a norm over one tensor
            return None
        if not isinstance(wanted, torch.Tensor) or wanted.shape != x.shape:
            return None
        if wanted.dtype != x.dtype:
            return None
        # Two roundings of the module against one of ours.
        rtol = 3 * torch.finfo(x.dtype).eps
        for norm in (RMSNorm(weight, eps), RMSNorm(1 + weight.float(), eps)):
            if torch.allclose(norm(x).float(), wanted.float(), rtol=rtol, atol=1e-6):
                return norm
    return None


@torch.inference_mode()
def is_llama_shaped(hf: Any) -> bool:
    """Whether a model is embedding, Llama's layers, final norm and head, and nothing else."""
    if not has_shape(hf) or not _ends_agree(hf):
        return False
    kinds = {_signature(layer): layer for layer in hf.model.layers}
    length = int(getattr(hf.config, "max_position_embeddings", 0) or 64)
    return all(_layer_agrees(layer, hf.model.rotary_emb, length) for layer in kinds.values())


def has_shape(hf: Any) -> bool:
    """Whether the module tree is that of a Llama-like causal language model."""
    base: Any = getattr(hf, "model", None)
    if base is None or _children(hf) != {"model", "lm_head"}:
        return False
    if _children(base) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if type(base.embed_tokens) is not nn.Embedding or not is_product(hf.lm_head):
        return False
    for layer in base.layers:
        if _children(layer) != _LAYER or _children(layer.mlp) != _MLP:
            return False
        names = _children(layer.self_attn)
        if names not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS):
            return False
        linears = [getattr(layer.self_attn, name) for name in sorted(_PROJECTIONS)]
        linears += [getattr(layer.mlp, name) for name in sorted(_MLP - {"act_fn"})]
        if not all(is_product(linear) for linear in linears):
            return False
    return len(base.layers) > 0


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def is_product(module: Any) -> bool:
    """Whether it is a linear product and nothing else, with plain or with quantised weights."""
    plain = type(module) is nn.Linear and is_plain(module.weight)
    return plain or type(module) is QuantisedLinear


def _signature(layer: Any) -> tuple[object, ...]:
    """What may differ in kind between layers: their plain attributes, and the norms they have."""
    modules = (layer, layer.self_attn, layer.mlp)
    plain = (int, float, bool, str, type(None))
    return (
        _children(layer.self_attn) == _PROJECTIONS,
        *(
            (type(module).__name__, key, value)
            for module in modules
            for key, value in sorted(vars(module).items())
            if isinstance(value, plain) and key != "layer_idx"
        ),
    )


def _formula(
    layer: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor | None:
    """Llama's layer: ``x [T, width]`` to the same. None if a norm is none, or a width differs."""
    attention, mlp = layer.self_attn, layer.mlp
    width = getattr(attention, "head_dim", None)
    names = ("input_layernorm", "post_attention_layernorm")
    norms = [as_rms_norm(getattr(layer, name)) for name in names]
    heads = [
        as_rms_norm(getattr(attention, n)) for n in sorted(_HEAD_NORMS) if hasattr(attention, n)
    ]
    if None in norms + heads or {norm.width for norm in heads if norm} > {width}:
        return None
    if cos.shape[-1] != width or not isinstance(attention.scaling, float):
        return None
    before, after = norms
    assert before is not None and after is not None

    def split(y: torch.Tensor, norm: Any = None) -> torch.Tensor:
        """``[T, heads * width]`` to ``[1, heads, T, width]``."""
        y = y.view(1, len(x), -1, width)
        return (y if norm is None else norm(y)).transpose(1, 2)

    def rotate(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat((-second, first), -1) * sin

    normed, (k_norm, q_norm) = before(x), heads or (None, None)
    attended = F.scaled_dot_product_attention(
        rotate(split(attention.q_proj(normed), q_norm)),
        rotate(split(attention.k_proj(normed), k_norm)),
        split(attention.v_proj(normed)),
        mask,
        scale=attention.scaling,
        enable_gqa=True,
    )
    x = x + attention.o_proj(attended.transpose(1, 2).flatten(2)[0])
    normed = after(x)
    more: torch.Tensor = mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    return x + more


def _layer_agrees(layer: Any, rotary_emb: Any, length: int) -> bool:
    """Whether a layer computes the formula, in float32 and to rounding, all over a context of
    ``length`` positions."""
    copied = copy.deepcopy(layer).float()
    for parent in (copied.self_attn, copied.mlp):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantisedLinear):
                setattr(parent, name, child.plain())
    # The copy has its own config, so this does not touch the model's attention.
    copied.self_attn.config = copy.deepcopy(layer.self_attn.config)
    copied.self_attn.config._attn_implementation = "eager"
    indices = [3, 4, 5, 17, length // 2, length // 2 + 1, length - 2, length - 1]
    rows = len(indices)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, copied.self_attn.q_proj.in_features, generator=generator)
    positions = torch.tensor(indices).clamp(0, length - 1)
    cos, sin = rotary_emb(x, positions[None])
    mask = torch.full((rows, rows), float("-inf")).triu_(1)
    wanted = copied(
        x[None],
        attention_mask=mask[None, None],
        position_embeddings=(cos, sin),
        position_ids=positions[None],
    )
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    got = _formula(copied, x, cos[0], sin[0], mask)
    return got is not None and torch.allclose(got, wanted.view_as(x), rtol=1e-3, atol=1e-4)


def _ends_agree(hf: Any) -> bool:
    """Whether there is nothing but embedding, final norm and head around the layers."""
    base = hf.model
    norm = as_rms_norm(base.norm)
    if norm is None:
        return False
    ids = torch.arange(8) * 7919 % base.embed_tokens.num_embeddings
    loud = 64.0  # large logits show a soft cap
    layers, base.layers = base.layers, nn.ModuleList()
    head = hf.lm_head
    if isinstance(head, QuantisedLinear):  # which turns another rounding into other codes
        hf.lm_head = head.plain().to(hf.dtype)
    handle = base.norm.register_forward_hook(lambda *call: call[2] * loud)
    try:
        wanted = hf(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        handle.remove()
        base.layers = layers
        plain, hf.lm_head = hf.lm_head, head
    x = F.embedding(ids, base.embed_tokens.weight)
    got = F.linear(norm(x) * loud, plain.weight, plain.bias)
    return relative_error(got, wanted) < 4 * torch.finfo(got.dtype).eps

"""Recognising Llama-shaped models, by structure and by results, and making the lean forward.

Nothing is believed from names alone: a layer of each kind is run in float32 on random input
against its lean counterpart, and embedding, final norm and head are compared with the model's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.model.backends.reference.lean import LeanLayer, LeanModel, Residual, Rotary
from paceline.model.backends.reference.norms import as_rms_norm
from paceline.model.backends.reference.products import (
    PrepackedLinear,
    is_plain,
    merged_product,
    product_of,
)
from paceline.model.quantised.weights import QuantisedLinear

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}

# Rope types whose frequencies depend on the configuration only.
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
_ROPE_TABLE_BYTES = 64 << 20
_BEYOND_CACHES = 128 << 20  # bytes; server processors have up to a few hundred, shared by cores


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def has_shape(hf: Any) -> bool:
    """Whether the module tree is that of a Llama-like causal language model."""
    base: Any = getattr(hf, "model", None)
    if base is None or _children(hf) != {"model", "lm_head"}:
        return False
    if _children(base) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    if type(base.embed_tokens) is not nn.Embedding or not _is_product(hf.lm_head):
        return False
    for layer in base.layers:
        if _children(layer) != _LAYER or _children(layer.mlp) != _MLP:
            return False
        names = _children(layer.self_attn)
        if names not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS):
            return False
        linears = [getattr(layer.self_attn, name) for name in sorted(_PROJECTIONS)]
        linears += [getattr(layer.mlp, name) for name in sorted(_MLP - {"act_fn"})]
        if not all(_is_product(linear) for linear in linears):
            return False
    return len(base.layers) > 0


def _is_product(module: Any) -> bool:
    """Whether it is a linear product and nothing else, with plain or with quantised weights."""
    plain = type(module) is nn.Linear and is_plain(module.weight)
    return plain or type(module) is QuantisedLinear


def _lean_layer(layer: Any) -> LeanLayer | None:
    """The lean counterpart of a layer, whose linears may be prepacked. None if a norm is
    unknown."""
    attention, mlp = layer.self_attn, layer.mlp
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(head_dim, int) or not isinstance(attention.scaling, float):
        return None
    norms = [as_rms_norm(layer.input_layernorm), as_rms_norm(layer.post_attention_layernorm)]
    q_norm = k_norm = None
    if hasattr(attention, "q_norm"):
        q_norm, k_norm = as_rms_norm(attention.q_norm), as_rms_norm(attention.k_norm)
        if q_norm is None or k_norm is None or {q_norm.width, k_norm.width} != {head_dim}:
            return None
    input_norm, mlp_norm = norms
    if input_norm is None or mlp_norm is None:
        return None
    qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
    if len({linear.bias is None for linear in qkv}) > 1:
        return None
    if (mlp.gate_proj.bias is None) != (mlp.up_proj.bias is None):
        return None
    return LeanLayer(
        input_norm=input_norm,
        qkv=merged_product(qkv),
        q_norm=q_norm,
        k_norm=k_norm,
        out=product_of(attention.o_proj),
        mlp_norm=mlp_norm,
        gate_up=merged_product([mlp.gate_proj, mlp.up_proj]),
        down=product_of(mlp.down_proj),
        heads=attention.q_proj.out_features // head_dim,
        kv_heads=attention.k_proj.out_features // head_dim,
        head_dim=head_dim,
        scaling=float(attention.scaling),
    )


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


def _layer_agrees(layer: Any, rotary_emb: Any, length: int) -> bool:
    """Whether the lean layer computes what the module does, in float32 and to rounding, all over a
    context of ``length`` positions."""
    copied = copy.deepcopy(layer).float()
    for parent in (copied.self_attn, copied.mlp):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantisedLinear):
                setattr(parent, name, child.plain())
    # The copy has its own config, so this does not touch the model's attention.
    copied.self_attn.config = copy.deepcopy(layer.self_attn.config)
    copied.self_attn.config._attn_implementation = "eager"
    device = copied.self_attn.q_proj.weight.device
    places = [3, 4, 5, 17, length // 2, length // 2 + 1, length - 2, length - 1]
    rows = len(places)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, copied.self_attn.q_proj.in_features, generator=generator).to(device)
    positions = torch.tensor(places, device=device).clamp(0, length - 1)
    cos, sin = rotary_emb(x, positions[None])
    mask = torch.full((rows, rows), float("-inf"), device=device).triu_(1)
    wanted = copied(
        x[None],
        attention_mask=mask[None, None],
        position_embeddings=(cos, sin),
        position_ids=positions[None],
    )
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    lean = _lean_layer(copied)
    if lean is None or cos.shape[-1] != lean.head_dim:
        return False

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scaling: float
    ) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            query, key, value, mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    stream = Residual(x)
    lean.run(0, stream, *_for_lean(cos[0], sin[0]), attend)
    return torch.allclose(stream.x, wanted.view_as(x), rtol=1e-3, atol=1e-4)


def _ends_agree(hf: Any) -> bool:
    """Whether there is nothing but embedding, final norm and head around the layers."""
    base = hf.model
    norm = as_rms_norm(base.norm)
    if norm is None:
        return False
    vocab = base.embed_tokens.num_embeddings
    ids = torch.arange(8, device=base.embed_tokens.weight.device) * 7919 % vocab
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
    got = product_of(plain)(Residual(x).normed(norm) * loud)
    return relative_error(got, wanted) < 4 * torch.finfo(got.dtype).eps


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``wanted``, whose rows are centred first."""
    got, wanted = got.float(), wanted.float()
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm()
    return float((got - wanted).norm() / spread.clamp_min(1e-12))


@torch.inference_mode()
def is_llama_shaped(hf: Any) -> bool:
    """Whether the lean forward may stand for this model. Asked before weights are prepacked."""
    if not has_shape(hf) or not _ends_agree(hf):
        return False
    base: Any = hf.model
    kinds = {_signature(layer): layer for layer in base.layers}
    length = int(getattr(hf.config, "max_position_embeddings", 0) or 64)
    return all(_layer_agrees(layer, base.rotary_emb, length) for layer in kinds.values())


@torch.inference_mode()
def lean_model(hf: Any) -> LeanModel | None:
    """The lean forward of a model that ``is_llama_shaped``, prepacked or not."""
    base = hf.model
    layers = [_lean_layer(layer) for layer in base.layers]
    norm = as_rms_norm(base.norm)
    complete = [layer for layer in layers if layer is not None]
    if norm is None or len(complete) < len(layers):
        return None
    embedding = base.embed_tokens.weight.detach()
    rotary = make_rotary(base.rotary_emb, hf.config, complete[0].head_dim, embedding)
    head = product_of(hf.lm_head)
    return LeanModel(embedding, complete, norm, head, rotary, _least_rows(hf))


def _least_rows(hf: Any) -> int:
    """Four where prepacked weights are too many for any cache, so that they come from memory."""
    prepacked = [m for m in hf.modules() if isinstance(m, PrepackedLinear)]
    streamed = sum(m.in_features * m.out_features * m.prepacked.element_size() for m in prepacked)
    return 4 if streamed > _BEYOND_CACHES else 1


def _for_lean(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[T, d]`` each to what Rotary returns."""
    half = sin.shape[-1] // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), -1)
    return cos[:, None], signed[:, None]


def make_rotary(rotary_emb: Any, config: Any, head_dim: int, like: torch.Tensor) -> Rotary:
    """Cosines and sines from the model's own module: from a table where they are static."""
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    small = 0 < positions * 2 * head_dim * like.element_size() <= _ROPE_TABLE_BYTES
    if small and getattr(rotary_emb, "rope_type", None) in _STATIC_ROPE:
        every = torch.arange(positions, device=like.device)
        cos, sin = rotary_emb(like, every[None])
        table = torch.cat(_for_lean(cos[0], sin[0]), 1)  # [positions, 2, head_dim]

        def look_up(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = table.index_select(0, rows)
            return found[:, :1], found[:, 1:]

        return look_up

    def compute(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rotary_emb(like, rows[None])
        return _for_lean(cos[0], sin[0])

    return compute

"""Which models the kernels know: decoders of Llama's shape, those of Gemma 2 and 3, and Mixtral's.

Llama-shaped ones are found by structure and by the results of their layers (llama.py). Of Gemma,
whose layers have two more norms, and of Mixtral, whose layers have experts, the classes are known.
No field of the configuration may be set that is not known (see fields.py), and whatever is
recognised must also give the reference's logits before it is used (see use.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.kernels.library import DTYPES, GELU_TANH, SILU
from paceline.model.backends.fields import unknown_field
from paceline.model.backends.native.llama import (
    RMSNorm,
    as_rms_norm,
    has_shape,
    is_llama_shaped,
    is_product,
)
from paceline.model.backends.native.packing import same_form
from paceline.model.paged.cache import LayerShape
from paceline.model.paged.masks import Pattern
from paceline.model.quantised.weights import is_plain

_GEMMA = {"Gemma2ForCausalLM", "Gemma3ForCausalLM"}
_EXPERTS = {"MixtralForCausalLM"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")


@dataclass(frozen=True)
class Norms:
    """Of one layer. What goes in, what comes out, and each head's."""

    attention: RMSNorm
    mlp: RMSNorm
    attention_after: RMSNorm | None = None
    mlp_after: RMSNorm | None = None
    q: RMSNorm | None = None
    k: RMSNorm | None = None


@dataclass(frozen=True)
class DecoderShape:
    """All that the kernels must know of a model beside its matrices."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    activation: int
    scaling: float
    embedding_scale: float
    attention_cap: float  # 0: none
    logit_cap: float
    norms: tuple[Norms, ...]
    final_norm: RMSNorm
    windows: tuple[int, ...]  # 0: none
    ropes: tuple[int, ...]  # which of `rope_kinds` a layer has
    rope_kinds: tuple[str | None, ...]  # as the rotary module wants to be asked


@torch.inference_mode()
def describe(
    hf: Any, shapes: Sequence[LayerShape], patterns: Sequence[Pattern]
) -> DecoderShape | str:
    """A model's description, or in a few words why the kernels cannot run it."""
    kind = type(hf).__name__
    if hf.device.type != "cpu":
        return "only a processor is supported"
    if hf.dtype not in DTYPES:
        return f"no weights in {str(hf.dtype).removeprefix('torch.')}"
    if any(pattern.chunk is not None for pattern in patterns):
        return "layers that see chunks are not known"
    if len(set(shapes)) > 1 or shapes[0][1] != shapes[0][2]:
        return "layers differ in their heads"
    gemma = kind in _GEMMA
    named = gemma or kind in _EXPERTS
    if not named and not has_shape(hf):
        return f"{kind} is no decoder of a known shape"
    strange = unknown_field(hf)
    if strange is not None:
        return f"the configuration's {strange} is not known"
    if not named and not is_llama_shaped(hf):
        return f"{kind} is no decoder of a known shape"
    if not all(map(_is_known, hf.model.layers)) or not is_product(hf.lm_head):
        return "weights that are no plain numbers"
    for layer in hf.model.layers:
        for parent, names in ((layer.self_attn, PROJECTIONS), (layer.mlp, GATED)):
            if hasattr(parent, "experts"):
                continue
            if not same_form([getattr(parent, name) for name in names]):
                return "matrices of one input differ in precision"
    dtypes = {parameter.dtype for parameter in hf.parameters()}
    if dtypes != {hf.dtype}:
        return "weights of several dtypes"
    return _described(hf, shapes[0], patterns, gemma)


def _described(
    hf: Any, shape: LayerShape, patterns: Sequence[Pattern], gemma: bool
) -> DecoderShape | str:
    base, config = hf.model, hf.config.get_text_config(decoder=True)
    norms = [_norms(layer, gemma) for layer in base.layers]
    known = tuple(norm for norm in norms if norm is not None)
    final = as_rms_norm(base.norm)
    if final is None or len(known) < len(norms):
        return "a norm is not an RMS norm"
    attention, mlp = base.layers[0].self_attn, base.layers[0].mlp
    activation = _activation(_acting(mlp).act_fn)
    if activation is None:
        return f"the activation {type(_acting(mlp).act_fn).__name__} is not known"
    kinds = getattr(base.rotary_emb, "layer_types", None)
    of_layer = [
        getattr(config, "layer_types", [None])[n] if kinds else None for n in range(len(norms))
    ]
    rope_kinds = tuple(dict.fromkeys(of_layer))
    rope = base.rotary_emb.rope_type
    if not set(rope.values() if isinstance(rope, dict) else [rope]) <= STATIC_ROPE:
        return f"the rotary embedding {rope} depends on the length"
    scale = getattr(base.embed_tokens, "embed_scale", None)
    return DecoderShape(
        heads=attention.q_proj.out_features // shape[1],
        kv_heads=shape[0],
        head_dim=shape[1],
        ffn=mlp.gate_proj.out_features if _acting(mlp) is mlp else mlp.experts.down_proj.shape[-1],
        activation=activation,
        scaling=float(attention.scaling),
        embedding_scale=1.0 if scale is None else float(scale.to(hf.dtype)),
        attention_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0)
        if gemma
        else 0.0,
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0) if gemma else 0.0,
        norms=known,
        final_norm=final,
        windows=tuple(pattern.window or 0 for pattern in patterns),
        ropes=tuple(rope_kinds.index(kind) for kind in of_layer),
        rope_kinds=rope_kinds,
    )


def _is_known(layer: Any) -> bool:
    """Whether the matrices of a layer are plain numbers or quantised by us."""
    linears = [getattr(layer.self_attn, name, None) for name in (*PROJECTIONS, "o_proj")]
    if _acting(layer.mlp) is not layer.mlp:
        return all(map(is_product, linears)) and all(map(is_plain, layer.mlp.parameters()))
    linears += [getattr(layer.mlp, name, None) for name in (*GATED, "down_proj")]
    return all(map(is_product, linears))


def _acting(mlp: Any) -> Any:
    """The module that has the activation: of experts theirs."""
    return getattr(mlp, "experts", mlp)


def _norms(layer: Any, gemma: bool) -> Norms | None:
    attention = layer.self_attn
    names = ["input_layernorm", "post_attention_layernorm"]
    if gemma:
        names = ["input_layernorm", "pre_feedforward_layernorm"]
        names += ["post_attention_layernorm", "post_feedforward_layernorm"]
    around = [as_rms_norm(getattr(layer, name)) for name in names]
    heads: list[RMSNorm | None] = [None, None]
    if hasattr(attention, "q_norm"):
        heads = [as_rms_norm(attention.q_norm), as_rms_norm(attention.k_norm)]
        if None in heads:
            return None
    before = around[:2]
    if None in around or before[0] is None or before[1] is None:
        return None
    after: list[RMSNorm | None] = around[2:] or [None, None]
    return Norms(before[0], before[1], after[0], after[1], heads[0], heads[1])


def _activation(module: nn.Module) -> int | None:
    """Which of the kernels' activations a module computes, by comparing results."""
    x = torch.linspace(-8, 8, 257)
    try:
        got = module(x)
    except (RuntimeError, TypeError):
        return None
    for code, wanted in (
        (SILU, torch.nn.functional.silu(x)),
        (GELU_TANH, torch.nn.functional.gelu(x, approximate="tanh")),
    ):
        if torch.allclose(got, wanted, atol=1e-6, rtol=1e-5):
            return code
    return None

"""Which models the kernels run: decoders like Llama's, Gemma's, GLM's, Mixtral's and Granite's.

Classes of transformers, norms and activations are recognised by their names. A recognised model is
used only if its logits also agree with the reference's (``native_backend``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from paceline.kernels.library import CLAMPED_SILU, DTYPES, GELU_TANH, SILU, CModel
from paceline.model.backends.native.packing import GATED, PROJECTIONS, all_or_none_quantised
from paceline.model.backends.native.split import NO_ROPE, PARTIAL, linear_of, split_layers
from paceline.model.paged.cache import LayerShape
from paceline.model.paged.segments import Pattern
from paceline.model.quantised.convert import Experts
from paceline.model.quantised.weights import QuantisedLinear, is_plain

_GEMMA = {"GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"}
_LLAMA = """
    Llama Mistral Ministral Ministral3 Mixtral Qwen2 Qwen3 Qwen3Moe Granite Cwm SeedOss
    SmolLM3 Phi3 Glm Glm4 Ernie4_5 Helium Mellum Olmo2 Olmo3 Exaone4 GptOss
"""
_KNOWN = _GEMMA | {f"{name}ForCausalLM" for name in _LLAMA.split()}
# Config options that the kernels do not implement, and the value with which each has no effect.
_NEUTRAL = {"norm_topk_prob": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_BETA = "llama_4_scaling_beta"
_LONGROPE = "longrope"  # two tables: of texts up to the original length, and of longer ones
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # tables do not depend on the text's length
# Field of CLayer, and the name of the layer's module that it holds.
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
_GLM_NORMS = {
    "attention_norm": "input_layernorm",
    "post_attention_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "post_mlp_norm": "post_mlp_layernorm",
}
QUERY_KEY_NORMS = ("q_norm", "k_norm")
_TANH = ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
_ACTIVATIONS = {"silu": SILU, "swish": SILU, **dict.fromkeys(_TANH, GELU_TANH)}


class RMSNorm(NamedTuple):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32."""

    weight: torch.Tensor  # [width]
    eps: float


class Rotation(NamedTuple):
    """How a model rotates queries and keys. ``module`` computes cosines and sines for each layer
    type in ``kinds`` (None: it takes no layer type; NO_ROPE: nothing is rotated). ``short_length``:
    with longrope, the tokens up to which a text is short. ``query_scaling`` (beta, length), as of
    Ministral 3: queries at position p are multiplied by ``1 + beta * log(1 + p // length)``."""

    module: Any
    kinds: Sequence[str | None] = (None,)
    short_length: int | None = None
    query_scaling: tuple[float, int] | None = None


@dataclass(frozen=True)
class DecoderShape:
    """What the kernels must know of a model in addition to its matrices."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    activation: int
    scaling: float
    embedding_scale: float
    attention_cap: float  # 0: no soft cap
    logit_cap: float
    residual_scale: float  # 0: no scaling
    logit_scale: float
    norms: tuple[Mapping[str, RMSNorm | None], ...]  # for each layer: field of CLayer, norm
    final_norm: RMSNorm
    windows: tuple[int, ...]  # sliding window of each layer, 0: full attention
    ropes: tuple[int, ...]  # for each layer, the index of its tables
    rotation: Rotation
    norms_all_heads: bool  # q_norm and k_norm are over all heads

    def fields(self) -> dict[str, Any]:
        """The fields of CModel that have the same name here, except ``final_norm``."""
        names = {field[0] for field in CModel._fields_} & vars(self).keys()
        return {name: getattr(self, name) for name in names - {"final_norm"}}


def scaled_norm(norm: Any, factor: float) -> RMSNorm | None:
    """A norm whose output is multiplied by ``factor``; None if that is 1."""
    return None if factor == 1 else RMSNorm(norm.weight.float() * factor, norm.eps)


@torch.inference_mode()
def describe_decoder(
    hf: Any, shapes: Sequence[LayerShape], patterns: Sequence[Pattern]
) -> DecoderShape | str:
    """Describe a model for the kernels, or say why they cannot run it. Splits its linear layers in
    place where the kernels need that (split.py), and makes its experts modules of their own."""
    kind = type(hf).__name__
    if hf.device.type != "cpu":
        return "only a processor is supported"
    if hf.dtype not in DTYPES:
        return f"no weights in {str(hf.dtype).removeprefix('torch.')}"
    if any(pattern.chunk is not None for pattern in patterns):
        return "layers that see chunks are not known"
    if len(set(shapes)) > 1 or shapes[0][1] != shapes[0][2]:
        return "layers differ in their heads"
    if kind not in _KNOWN or not type(hf).__module__.startswith("transformers.models."):
        return f"{kind} is no decoder of a known shape"
    rope = hf.model.rotary_emb.rope_type
    kinds = {*rope.values()} if isinstance(rope, dict) else {rope}
    if rope != _LONGROPE and not kinds <= STATIC_ROPE:
        return f"the rotary embedding {rope} depends on the length"
    option = unsupported_option(hf)
    if option is not None:
        return f"the kernels do not have {option}"
    split_layers(hf, shapes[0][1])
    for layer in hf.model.layers:
        if hasattr(layer.mlp, "experts") and not isinstance(layer.mlp.experts, Experts):
            layer.mlp.experts = Experts(layer.mlp.experts)
    if not all(map(_is_packable, (hf.lm_head, *_matrices(hf)))):
        return "weights that are no plain numbers"
    if not all(map(_shares_precision, hf.model.layers)):
        return "matrices of one input differ in precision"
    if {parameter.dtype for parameter in hf.parameters()} != {hf.dtype}:
        return "weights of several dtypes"
    return _described(hf, shapes[0], patterns, kind in _GEMMA)


def _described(
    hf: Any, shape: LayerShape, patterns: Sequence[Pattern], gemma: bool
) -> DecoderShape | str:
    base, config = hf.model, hf.config.get_text_config(decoder=True)
    norms = [_norms(layer, gemma) for layer in base.layers]
    final = as_rms_norm(base.norm, gemma)
    if final is None or any(norm is None for layer in norms for norm in layer.values()):
        return "a norm is not an RMS norm"
    first = base.layers[0]
    attention = first.self_attn
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    activation = CLAMPED_SILU if config.model_type == "gpt_oss" else _ACTIVATIONS.get(name)
    if activation is None:
        return f"the activation {name} is not known"
    layer_types = _rotations(base, config)
    rope_kinds = tuple(dict.fromkeys(layer_types))
    rotary = _rotary_of(base)
    for kind in {*rope_kinds} - {NO_ROPE}:
        cos, _ = rotary(torch.zeros(1), torch.arange(1)[None], *([kind] if kind else ()))
        if cos.shape[-1] != shape[1] and type(hf).__name__ not in PARTIAL:
            return f"the rotary embedding turns {cos.shape[-1]} of {shape[1]} numbers of a head"
    options, q_norm = config.rope_parameters or {}, norms[0].get("q_norm")
    original = int(options.get("original_max_position_embeddings") or 0)
    beta = float(options.get(_BETA) or 0.0)
    short_length = original if base.rotary_emb.rope_type == _LONGROPE else None
    scale = getattr(base.embed_tokens, "embed_scale", None)
    caps = [
        float((gemma and getattr(config, name, None)) or 0.0)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    ]
    return DecoderShape(
        heads=linear_of(attention, "q_proj").out_features // shape[1],
        kv_heads=shape[0],
        head_dim=shape[1],
        ffn=max(linear_of(_mlps(layer)[0], "gate_proj").out_features for layer in base.layers),
        activation=activation,
        scaling=float(attention.scaling),
        embedding_scale=float(
            getattr(config, "embedding_multiplier", 1.0) if scale is None else scale.to(hf.dtype)
        ),
        attention_cap=caps[0],
        logit_cap=caps[1],
        residual_scale=float(getattr(config, "residual_multiplier", 0.0)),
        logit_scale=1 / getattr(config, "logits_scaling", 1.0),
        norms=tuple(norms),
        final_norm=final,
        windows=tuple(pattern.window or 0 for pattern in patterns),
        ropes=tuple(rope_kinds.index(kind) * (2 if short_length else 1) for kind in layer_types),
        rotation=Rotation(rotary, rope_kinds, short_length, (beta, original) if beta else None),
        norms_all_heads=q_norm is not None and len(q_norm.weight) > shape[1],
    )


def _rotary_of(base: Any) -> Any:
    """What gives the cosines and sines of all numbers of a head: GPT-OSS's module gives those of
    the first half, which are those of the second."""
    module = base.rotary_emb
    if type(module).__name__ != "GptOssRotaryEmbedding":
        return module
    return lambda *where: tuple(torch.cat((part, part), -1) for part in module(*where))


def _rotations(base: Any, config: Any) -> list[str | None]:
    """The type of each layer for the rotary module; NO_ROPE for layers that do not rotate."""
    types: list[str | None] = [None] * len(base.layers)
    if getattr(base.rotary_emb, "layer_types", None):
        types = config.layer_types[: len(types)]
    for n, layer in enumerate(base.layers):
        attention = layer.self_attn
        # EXAONE 4 with windows rotates only in the layers that have one.
        windows = type(attention).__name__ == "Exaone4Attention" and attention.sliding_window
        if not getattr(attention, "use_rope", True) or (windows and not attention.is_sliding):
            types[n] = NO_ROPE
    return types


def _matrices(hf: Any) -> list[Any]:
    """The matrices of all layers: linear modules, and parameters of routers and experts."""
    matrices: list[Any] = []
    for layer in hf.model.layers:
        matrices += [linear_of(layer.self_attn, name) for name in (*PROJECTIONS, "o_proj")]
        if hasattr(layer.mlp, "experts"):
            matrices += layer.mlp.parameters()
        for mlp in _mlps(layer):
            matrices += [linear_of(mlp, name) for name in (*GATED, "down_proj")]
    return matrices


def _is_packable(matrix: Any) -> bool:
    """Whether a module or parameter is just a linear product with plain or quantised weights."""
    weight = matrix.weight if type(matrix) is nn.Linear else matrix
    return isinstance(matrix, QuantisedLinear) or is_plain(weight)


def _shares_precision(layer: Any) -> bool:
    """Whether the matrices of a layer that share an input can be packed into one, and its experts
    take activations of one width."""
    groups = [[linear_of(layer.self_attn, name) for name in PROJECTIONS]]
    mlps = _mlps(layer)
    groups += [[linear_of(mlp, name) for name in GATED] for mlp in mlps]
    experts = [[linear_of(mlp, name) for mlp in mlps] for name in (*GATED, "down_proj")]
    return all(map(all_or_none_quantised, groups)) and all(map(_same_activations, experts))


def _same_activations(linears: Sequence[Any]) -> bool:
    """Whether these quantise their input alike: the kernels do so once for all experts."""
    widths = {linear.int16_activations for linear in linears if isinstance(linear, QuantisedLinear)}
    return all_or_none_quantised(linears) and len(widths) < 2


def _mlps(layer: Any) -> list[Any]:
    """The layer's MLP or its experts."""
    return list(getattr(layer.mlp, "experts", (layer.mlp,)))


def as_rms_norm(module: Any, gemma: bool) -> RMSNorm | None:
    """A module whose class's name says RMSNorm; None for others. Gemma stores weights minus 1."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    weight = module.weight.detach()
    return RMSNorm(1 + weight.float() if gemma else weight, eps)


def _norms(layer: Any, gemma: bool) -> dict[str, RMSNorm | None]:
    """The norms of a layer by their field in CLayer; None for a norm that is no RMS norm."""
    tables = _GEMMA_NORMS, _GLM_NORMS, _NORMS, _POST_NORMS
    names = next(names for names in tables if all(hasattr(layer, n) for n in names.values()))
    modules = {field: getattr(layer, name) for field, name in names.items()}
    attention = layer.self_attn
    modules |= {
        name: getattr(attention, name) for name in QUERY_KEY_NORMS if hasattr(attention, name)
    }
    return {field: as_rms_norm(module, gemma) for field, module in modules.items()}


def unsupported_option(hf: Any) -> str | None:
    """The first option of the config that the kernels do not implement and that has an effect."""
    config = hf.config.get_text_config(decoder=True)
    options = config.to_dict() | (getattr(config, "rope_parameters", None) or {})
    for name, neutral in _NEUTRAL.items():
        if options.get(name) not in (None, neutral):
            return f"{name} = {options[name]}"
    return None

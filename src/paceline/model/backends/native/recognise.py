"""Which models the kernels know: decoders of Llama's shape, those of Gemma 2 and 3, and Mixtral's.

Of Llama-shaped ones nothing is believed from names alone: a layer of each kind is run in float32 on
random input against the formula. Of Gemma, whose layers have two more norms, and of Mixtral, whose
layers have experts, the classes are known. No field of the configuration may be set that is not
known (fields.py), and whatever is recognised must also give the reference's logits before it is
used (``native_backend``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.kernels.library import DTYPES, GELU_TANH, SILU
from paceline.model.backends.fields import unknown_field
from paceline.model.backends.native.packing import GATED, PROJECTIONS, same_form
from paceline.model.paged.cache import LayerShape
from paceline.model.paged.masks import Pattern
from paceline.model.quantised.weights import QuantisedLinear, is_plain

_GEMMA = {"Gemma2ForCausalLM", "Gemma3ForCausalLM"}
_EXPERTS = {"MixtralForCausalLM"}
STATIC_ROPE = {"default", "linear", "llama3", "yarn"}
# The kernels' names of norms, and those of a layer's modules.
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_after": "post_feedforward_layernorm",
}
_HEAD_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class RMSNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32."""

    weight: torch.Tensor  # [width]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same shape."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


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
    norms: tuple[Mapping[str, RMSNorm], ...]  # of each layer, by the kernels' names
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
    if not named and not _has_shape(hf):
        return f"{kind} is no decoder of a known shape"
    if not all(map(_is_product, (hf.lm_head, *_products(hf)))):
        return "weights that are no plain numbers"
    strange = unknown_field(hf)
    if strange is not None:
        return f"the configuration's {strange} is not known"
    if not named and not is_llama_shaped(hf):
        return f"{kind} is no decoder of a known shape"
    if not all(map(_packs, hf.model.layers)):
        return "matrices of one input differ in precision"
    if {parameter.dtype for parameter in hf.parameters()} != {hf.dtype}:
        return "weights of several dtypes"
    return _described(hf, shapes[0], patterns, gemma)


def _described(
    hf: Any, shape: LayerShape, patterns: Sequence[Pattern], gemma: bool
) -> DecoderShape | str:
    base, config = hf.model, hf.config.get_text_config(decoder=True)
    norms = [_norms(layer, _GEMMA_NORMS if gemma else _NORMS) for layer in base.layers]
    known = tuple(norm for norm in norms if norm is not None)
    final = as_rms_norm(base.norm)
    if final is None or len(known) < len(norms):
        return "a norm is not an RMS norm"
    attention, mlp = base.layers[0].self_attn, base.layers[0].mlp
    experts = getattr(mlp, "experts", None)
    function = (experts or mlp).act_fn
    activation = _activation(function)
    if activation is None:
        return f"the activation {type(function).__name__} is not known"
    of_layer: list[str | None] = [None] * len(norms)
    if getattr(base.rotary_emb, "layer_types", None):
        of_layer = config.layer_types[: len(norms)]
    rope_kinds = tuple(dict.fromkeys(of_layer))
    rope = base.rotary_emb.rope_type
    if not set(rope.values() if isinstance(rope, dict) else [rope]) <= STATIC_ROPE:
        return f"the rotary embedding {rope} depends on the length"
    scale = getattr(base.embed_tokens, "embed_scale", None)
    caps = [
        float((gemma and getattr(config, name, None)) or 0.0)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
    ]
    return DecoderShape(
        heads=attention.q_proj.out_features // shape[1],
        kv_heads=shape[0],
        head_dim=shape[1],
        ffn=mlp.gate_proj.out_features if experts is None else experts.down_proj.shape[-1],
        activation=activation,
        scaling=float(attention.scaling),
        embedding_scale=1.0 if scale is None else float(scale.to(hf.dtype)),
        attention_cap=caps[0],
        logit_cap=caps[1],
        norms=known,
        final_norm=final,
        windows=tuple(pattern.window or 0 for pattern in patterns),
        ropes=tuple(rope_kinds.index(kind) for kind in of_layer),
        rope_kinds=rope_kinds,
    )


# -- structure ---------------------------------------------------------------------------------


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _has_shape(hf: Any) -> bool:
    """Whether the module tree is that of a Llama-like causal language model."""
    base: Any = getattr(hf, "model", None)
    if base is None or _children(hf) != {"model", "lm_head"}:
        return False
    if _children(base) != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return False
    attention = {*PROJECTIONS, "o_proj"}
    return (
        type(base.embed_tokens) is nn.Embedding
        and len(base.layers) > 0
        and all(
            _children(layer) == {"self_attn", "mlp", *_NORMS.values()}
            and _children(layer.mlp) == {*GATED, "down_proj", "act_fn"}
            and _children(layer.self_attn) in (attention, attention | set(_HEAD_NORMS))
            for layer in base.layers
        )
    )


def _products(hf: Any) -> list[Any]:
    """The matrices of all layers: modules, and parameters of experts."""
    products: list[Any] = []
    for layer in hf.model.layers:
        products += [getattr(layer.self_attn, name, None) for name in (*PROJECTIONS, "o_proj")]
        if hasattr(layer.mlp, "experts"):
            products += layer.mlp.parameters()
        else:
            products += [getattr(layer.mlp, name, None) for name in (*GATED, "down_proj")]
    return products


def _is_product(matrix: Any) -> bool:
    """Whether it is a linear product and nothing else, with plain or with quantised weights."""
    weight = matrix.weight if type(matrix) is nn.Linear else matrix
    return type(matrix) is QuantisedLinear or is_plain(weight)


def _packs(layer: Any) -> bool:
    """Whether the matrices that share an input can be packed into one."""
    groups = [[getattr(layer.self_attn, name) for name in PROJECTIONS]]
    if not hasattr(layer.mlp, "experts"):
        groups.append([getattr(layer.mlp, name) for name in GATED])
    return all(map(same_form, groups))


# -- by results --------------------------------------------------------------------------------


def as_rms_norm(module: nn.Module) -> RMSNorm | None:
    """The RMS norm that a module computes, found by comparing results, or None.

    Both ``weight * norm(x)`` and ``(1 + weight) * norm(x)``, with the sum in float32, are known.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not isinstance(eps, float):
        return None
    if _children(module) or getattr(module, "bias", None) is not None:
        return None
    weight = weight.detach()
    x = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0))
    # The scales tell a wrong epsilon, the offset a LayerNorm, from the true thing.
    x = x * torch.tensor([[1e-3], [0.05], [1.0], [30.0]]) + torch.tensor([[0.0], [0.0], [2.0], [0]])
    x = x.to(weight)
    with torch.inference_mode():
        try:
            wanted = module(x)
        except (RuntimeError, TypeError):  # takes other inputs: not a norm over one tensor
            return None
        if not isinstance(wanted, torch.Tensor) or (wanted.shape, wanted.dtype) != (
            x.shape,
            x.dtype,
        ):
            return None
        # Two roundings of the module against one of ours.
        rtol = 3 * torch.finfo(x.dtype).eps
        for norm in (RMSNorm(weight, eps), RMSNorm(1 + weight.float(), eps)):
            if torch.allclose(norm(x).float(), wanted.float(), rtol=rtol, atol=1e-6):
                return norm
    return None


def _norms(layer: Any, names: Mapping[str, str]) -> dict[str, RMSNorm] | None:
    """The norms of a layer by the kernels' names; None if one of them is none."""
    modules = {field: getattr(layer, name) for field, name in names.items()}
    attention = layer.self_attn
    modules |= {name: getattr(attention, name) for name in _HEAD_NORMS if hasattr(attention, name)}
    norms = {field: as_rms_norm(module) for field, module in modules.items()}
    known = {field: norm for field, norm in norms.items() if norm is not None}
    return known if len(known) == len(norms) else None


def _activation(module: nn.Module) -> int | None:
    """Which of the kernels' activations a module computes."""
    x = torch.linspace(-8, 8, 257)
    try:
        got = module(x)
    except (RuntimeError, TypeError):
        return None
    for code, wanted in ((SILU, F.silu(x)), (GELU_TANH, F.gelu(x, approximate="tanh"))):
        if torch.allclose(got, wanted, atol=1e-6, rtol=1e-5):
            return code
    return None


@torch.inference_mode()
def is_llama_shaped(hf: Any) -> bool:
    """Whether a model has Llama's module tree, and a layer of each kind computes its formula."""
    if not _has_shape(hf):
        return False
    kinds = {_signature(layer): layer for layer in hf.model.layers}
    length = int(getattr(hf.config, "max_position_embeddings", 0) or 64)
    return all(_layer_agrees(layer, hf.model.rotary_emb, length) for layer in kinds.values())


def _signature(layer: Any) -> tuple[object, ...]:
    """What may differ in kind between layers: their plain attributes, and the norms they have."""
    plain = (int, float, bool, str, type(None))
    return (
        hasattr(layer.self_attn, "q_norm"),
        *(
            (type(module).__name__, key, value)
            for module in (layer, layer.self_attn, layer.mlp)
            for key, value in sorted(vars(module).items())
            if isinstance(value, plain) and key != "layer_idx"
        ),
    )


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


def _formula(
    layer: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor | None:
    """Llama's layer: ``x [T, width]`` to the same. None if a norm is none, or a width differs."""
    attention, mlp, norms = layer.self_attn, layer.mlp, _norms(layer, _NORMS)
    width = getattr(attention, "head_dim", None)
    if norms is None or cos.shape[-1] != width or not isinstance(attention.scaling, float):
        return None
    heads = [norms[name] for name in _HEAD_NORMS if name in norms]
    if any(len(norm.weight) != width for norm in heads):
        return None

    def split(y: torch.Tensor, norm: str = "") -> torch.Tensor:
        """``[T, heads * width]`` to ``[1, heads, T, width]``."""
        y = y.view(1, len(x), -1, width)
        return (norms[norm](y) if norm in norms else y).transpose(1, 2)

    def rotate(y: torch.Tensor) -> torch.Tensor:
        first, second = y.chunk(2, -1)
        return y * cos + torch.cat((-second, first), -1) * sin

    normed = norms["attention_norm"](x)
    attended = F.scaled_dot_product_attention(
        rotate(split(attention.q_proj(normed), "q_norm")),
        rotate(split(attention.k_proj(normed), "k_norm")),
        split(attention.v_proj(normed)),
        mask,
        scale=attention.scaling,
        enable_gqa=True,
    )
    x = x + attention.o_proj(attended.transpose(1, 2).flatten(2)[0])
    normed = norms["mlp_norm"](x)
    more: torch.Tensor = mlp.down_proj(F.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    return x + more

"""Every causal architecture that transformers can build, tiny, with what its checkpoints set.

The list is transformers' own. A config is its class's default, which has a published checkpoint's
flags, with sizes shrunk by their names; ``PUBLISHED`` adds what other checkpoints of the kind set.
Original lengths, windows and chunks are far below the prompts' lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from support.recurrent_models import RECURRENT

VOCAB = 61
WINDOW = 6
ORIGINAL = 48  # positions before a rotary embedding was stretched


def _each(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


_SIZES: dict[str, Any] = {
    **_each(VOCAB, "vocab_size", "vocab_size_per_layer_input", "audio_vocab_size"),
    **_each(VOCAB, "shape_vocab_size", "pronunciation_vocab_size"),
    **_each(32, "hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"),
    **_each(32, "shape_embed_dim", "pronunciation_embed_dim"),
    **_each(4, "num_attention_heads", "n_head", "n_heads"),
    **_each(2, "num_key_value_heads", "num_global_key_value_heads", "kv_n_heads"),
    **_each(8, "head_dim", "kv_channels", "qk_nope_head_dim", "hidden_size_per_layer_input"),
    **_each(16, "global_head_dim"),
    **_each(40, "intermediate_size", "intermediate_size_mlp", "n_inner", "ffn_dim", "dff"),
    **_each(40, "ffn_hidden_size", "dense_intermediate_size"),
    **_each(16, "moe_intermediate_size", "shared_expert_intermediate_size", "dim_model_base"),
    **_each(16, "expert_ffn_hidden_size", "shared_intermediate_size"),
    **_each(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    **_each(2, "num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "num_experts_per_token"),
    **_each(1, "n_group", "topk_group", "zero_expert_num", "num_expert_group"),
    **_each(16, "q_lora_rank", "kv_lora_rank"),
    **_each(4, "qk_rope_head_dim", "laurel_rank"),
    "v_head_dim": 6,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    **_each(WINDOW, "sliding_window", "attention_chunk_size", "local_attention"),
    **_each(128, "max_position_embeddings", "n_positions", "max_seq_len"),
    "original_max_position_embeddings": ORIGINAL,
    "floor_scale": 8,  # Llama 4's, in tokens
    **_each(28, "image_size"),
    **_each(14, "patch_size"),
    **_each(0, "bos_token_id", "pad_token_id"),
    "eos_token_id": 2,
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers")
_BY_NUMBER = ("moe_layers", "full_attn_idxs", "cross_attention_layers")  # no list of all layers

_FULL = {"rope_type": "default", "rope_theta": 1e4}
_SLIDING_FULL = ["sliding_attention", "full_attention"]
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": ORIGINAL,
}
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0},
    "original_max_position_embeddings": ORIGINAL,
}
_DEEPSEEK_YARN = _YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


def _longrope(pairs: int, **more: float) -> dict[str, Any]:
    """``pairs``: rotated pairs of a head."""
    return {
        **{"rope_type": "longrope", "rope_theta": 1e4},
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [1.0 + 2.0 * pair for pair in range(pairs)],
        "original_max_position_embeddings": ORIGINAL,
        **more,
    }


# What a default lacks to be built at all, or to be of a size for tests.
_NEEDED: dict[str, dict[str, Any]] = {
    **{kind: changes for kind, (_, changes) in RECURRENT.items()},
    "cohere_compass_text": {
        "layer_types": _SLIDING_FULL,
        "rope_parameters": {
            "sliding_attention": _FULL | {"mrope_section": [1, 1, 2]},
            "full_attention": _FULL | {"mrope_section": [1, 1, 2]},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 5e5},
        "ffn_config": {
            **{"hidden_size": 32, "ffn_hidden_size": 40},
            **{"moe_num_experts": 4, "moe_top_k": 2},
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "fuyu": {"image_size": 28, "patch_size": 14},
    "gemma3n": {"num_kv_shared_layers": 0},
    "gemma3n_text": {"num_kv_shared_layers": 0, "intermediate_size": 40},
    "mllama": {"cross_attention_layers": [1]},
    "nemotron": {"num_key_value_heads": 2},
    "roc_bert": {"concat_input": True},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}

PUBLISHED: dict[str, dict[str, dict[str, Any]]] = {
    "arcee": {"AFM 4.5B": {"rope_parameters": _YARN | {"beta_fast": 32.0, "beta_slow": 1.0}}},
    "cohere": {"R+": {"use_qk_norm": True, "logit_scale": 0.83}},
    "deepseek_v2": {
        "Lite": {"q_lora_rank": None, "rope_parameters": _DEEPSEEK_YARN},
        "V2": {
            **{"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
            **{"routed_scaling_factor": 16.0, "rope_parameters": _DEEPSEEK_YARN},
        },
    },
    "deepseek_v3": {
        "V3": {"n_group": 2, "topk_group": 1, "rope_parameters": _DEEPSEEK_YARN},
        "R1": {"rope_parameters": _DEEPSEEK_YARN | {"mscale": 1.0}, "first_k_dense_replace": 1},
    },
    "exaone4": {
        "32B": {
            "layer_types": _SLIDING_FULL,
            "rope_parameters": _LLAMA3 | {"factor": 16.0},
        },
    },
    "gemma2": {"27B": {"query_pre_attn_scalar": 20, "layer_types": _SLIDING_FULL}},
    "gemma3_text": {
        "4B": {
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": _FULL,
                "full_attention": _LINEAR | {"rope_theta": 1e6},
            },
        },
        "embedding": {"use_bidirectional_attention": True},
    },
    "gemma3n_text": {
        "E2B": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": _SLIDING_FULL * 2,
            "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "intermediate_size": [40] * 4,
        },
    },
    "gemma4_text": {
        "E2B": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": _SLIDING_FULL * 2,
        },
        "31B": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
        "26B": {
            **{"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
            "moe_intermediate_size": 16,
        },
    },
    "glm4_moe": {"4.5": {"use_qk_norm": True, "n_group": 1, "first_k_dense_replace": 1}},
    "gpt2": {
        "mistral": {
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
        },
    },
    "gpt_bigcode": {"heads": {"multi_query": False}},
    "gpt_neox": {"serial": {"use_parallel_residual": False, "attention_bias": False}},
    "gpt_oss": {
        "20B": {
            "rope_parameters": _YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        },
    },
    "granite": {
        "3": {
            **{"logits_scaling": 8.0, "attention_multiplier": 0.25},
            **{"residual_multiplier": 0.22, "embedding_multiplier": 12.0},
        },
    },
    "granitemoe": {
        "3": {
            **{"logits_scaling": 6.0, "attention_multiplier": 0.25},
            **{"residual_multiplier": 0.22, "embedding_multiplier": 12.0},
        },
    },
    "hunyuan_v1_dense": {"7B": {"rope_parameters": _DYNAMIC | {"alpha": 1000.0, "factor": 1.0}}},
    "hunyuan_v1_moe": {"A13B": {"num_experts": 4, "moe_topk": 2}},
    "hyperclovax": {
        "14B": {
            **{"logits_scaling": 0.125, "attention_multiplier": 0.25},
            **{"residual_multiplier": 0.5, "embedding_multiplier": 10.0},
        },
    },
    "internlm3": {"8B": {"rope_parameters": _DYNAMIC | {"factor": 6.0}}},
    "llama": {
        "3.1": {"rope_parameters": _LLAMA3},
        "linear": {"rope_parameters": _LINEAR},
        "dynamic": {"rope_parameters": _DYNAMIC},
        "yarn": {"rope_parameters": _YARN},
        "longrope": {"rope_parameters": _longrope(4)},
        "biased": {"attention_bias": True, "mlp_bias": True},
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    },
    "llama4_text": {
        "Scout": {"rope_parameters": _LLAMA3 | {"factor": 16.0}},
        "no chunks": {"attn_temperature_tuning": False, "use_qk_norm": False},
    },
    "longcat_flash": {"Flash": {"rope_parameters": _DEEPSEEK_YARN}},
    "minicpm3": {
        "4B": {"rope_parameters": _longrope(2, factor=1.0), "scale_emb": 12, "scale_depth": 1.4}
    },
    "mistral": {"0.3": {"sliding_window": None}},
    "mixtral": {"window": {"sliding_window": WINDOW}},
    "nemotron": {"untied": {"rope_parameters": _FULL | {"partial_rotary_factor": 0.5}}},
    "olmo": {"7B": {"clip_qkv": 0.5}},
    "olmo3": {
        "32B": {
            "rope_parameters": {
                "sliding_attention": _FULL,
                "full_attention": _YARN | {"beta_fast": 32.0, "beta_slow": 1.0},
            },
        },
    },
    "olmoe": {"clipped": {"clip_qkv": 0.5, "norm_topk_prob": True}},
    "opt": {"350M": {"do_layer_norm_before": False, "word_embed_proj_dim": 16}},
    "phi": {"qk": {"qk_layernorm": True}},
    "phi3": {
        "window": {"sliding_window": WINDOW},
        "3.5": {"rope_parameters": _longrope(4)},
        "4-mini": {"rope_parameters": _longrope(3, partial_rotary_factor=0.75)},
    },
    "phimoe": {
        "3.5": {"rope_parameters": _longrope(4, short_mscale=1.24, long_mscale=1.24)},
    },
    "qwen2": {
        "yarn": {"rope_parameters": _YARN},
        "window": {
            **{"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
            "layer_types": ["full_attention", "sliding_attention"],
        },
    },
    "qwen2_moe": {"normed": {"norm_topk_prob": True, "mlp_only_layers": [0]}},
    "qwen3": {"yarn": {"rope_parameters": _YARN}},
    "qwen3_moe": {
        "yarn": {"rope_parameters": _YARN, "norm_topk_prob": True},
        "dense": {"mlp_only_layers": [1], "norm_topk_prob": True},
    },
    "smollm3": {"yarn": {"rope_parameters": _YARN, "no_rope_layers": [1, 0]}},
    "starcoder2": {"window": {"sliding_window": WINDOW}},
}


def kinds() -> dict[str, type]:
    """Config classes of transformers' causal language models, by model type."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}


def cases() -> Iterator[str]:
    """``kind`` as its default is, and ``kind:variant``."""
    for kind in sorted(kinds()):
        yield kind
        yield from (f"{kind}:{variant}" for variant in PUBLISHED.get(kind, ()))


def tiny_config(case: str) -> Any:
    """The config of a case. Raises what the kind's own class does of its default."""
    kind, _, variant = case.partition(":")
    default = kinds()[kind]()
    changes = _NEEDED.get(kind, {}) | (PUBLISHED[kind][variant] if variant else {})
    return _shrunk(default, changes)


def _shrunk(default: Any, changes: dict[str, Any]) -> Any:
    """Changes of a composed config are its text part's."""
    said = default.to_dict()
    smaller: dict[str, Any] = {}
    text = default.get_text_config(decoder=True)
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if part is not None:
            smaller[name] = _shrunk(part, changes if part is text else {})
    if text is default or not smaller:
        smaller |= _smaller(default, said) | changes
    return type(default)(**smaller)


def _smaller(default: Any, said: dict[str, Any]) -> dict[str, Any]:
    """Its sizes, as many layers as it has kinds of them, rotary embeddings of a short original."""
    options = {name: size for name, size in _SIZES.items() if said.get(name) is not None}
    depth = next((said[name] for name in _LAYERS if isinstance(said.get(name), int)), 0)
    each = {
        name: value
        for name, value in said.items()
        if isinstance(value, list) and len(value) == depth and name not in _BY_NUMBER
    }
    rows = [tuple(str(value[n]) for value in each.values()) for n in range(depth)]
    first = {row: rows.index(row) for row in rows}
    kept = sorted(first.values()) if len(first) > 1 else [0, 1]
    options |= {name: len(kept) for name in _LAYERS if said.get(name)}
    options |= {name: [value[n] for n in kept] for name, value in each.items()}
    if said.get("num_key_value_heads", 0) == said.get("num_attention_heads"):
        options["num_key_value_heads"] = 4
    if "qk_rope_head_dim" in said:
        options["head_dim"] = 4
        if said.get("head_dim") != said["qk_rope_head_dim"]:
            del options["head_dim"]
    elif "head_dim" in said:
        options["head_dim"] = 8
    if "is_decoder" in said:
        options["is_decoder"] = True
    if isinstance(said.get("rope_parameters"), dict):
        options["rope_parameters"] = _near(said["rope_parameters"])
    return options


def _near(rope: dict[str, Any]) -> dict[str, Any]:
    lengths = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": 128}
    return {
        name: _near(value) if isinstance(value, dict) else lengths.get(name, value)
        for name, value in rope.items()
    }

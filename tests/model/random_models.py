"""Tiny random models of many architectures, and batches to run them on."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from paceline.model.probe import register
from paceline.model.target import CausalModel
from support.recurrent_models import RECURRENT

VOCAB = 61
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,  # large enough for attention to matter
}
WINDOW = 6
SLIDING_FULL = ["sliding_attention", "full_attention"]

# One for each way of attending, of numbering positions and of making logits, as trees, chunks and
# features meet them; test_every_architecture.py has all architectures, with chains.
# name -> config class and what differs from COMMON
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_mha": ("LlamaConfig", {"num_key_value_heads": 4}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": WINDOW,
            "layer_types": SLIDING_FULL,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": WINDOW, "layer_types": SLIDING_FULL}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "sliding_window": WINDOW,
            "layer_types": SLIDING_FULL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "granite": (
        "GraniteConfig",
        {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    ),
    "cohere2": (
        "Cohere2Config",
        {"logit_scale": 0.3, "sliding_window": WINDOW, "layer_types": SLIDING_FULL},
    ),
    "gpt2": (
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 40},
    ),
    "opt": ("OPTConfig", {"ffn_dim": 40, "word_embed_proj_dim": 32}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "llama4": (
        "Llama4TextConfig",
        {
            "intermediate_size_mlp": 40,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    **RECURRENT,
}


def tiny_config(name: str) -> Any:
    kind, changes = SPECS[name]
    base = COMMON
    if name == "gpt2":
        base = {key: COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
        base["initializer_range"] = 0.3
    if name == "opt":
        left_out = ("head_dim", "num_key_value_heads", "initializer_range")
        base = {key: value for key, value in base.items() if key not in left_out}
        base["init_std"] = 0.3
    if name == "deepseek_v3":
        base = {key: value for key, value in base.items() if key != "head_dim"}
    return getattr(transformers, kind)(**{**base, **changes})


def tiny_pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[CausalModel, Any]:
    """Our model and transformers' own, eager, with the same random weights."""
    register()
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="eager")
    for parameter in reference.parameters():  # sinks, biases and norms, too, are not constant
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    ours = AutoModelForCausalLM.from_config(tiny_config(name), attn_implementation="paceline")
    ours.load_state_dict(reference.state_dict())
    return CausalModel(ours.to(dtype), name), reference.to(dtype).eval()

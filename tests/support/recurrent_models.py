"""Tiny configurations of models with recurrent layers: config class, and what differs from ours."""

from __future__ import annotations

from typing import Any

_RECURRENT_FULL = ["linear_attention", "full_attention"]
# States end in 32 numbers, as the kernels take them; Nemotron-H's in 8, for torch.
_MAMBA2: dict[str, Any] = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 2},
    **{"mamba_chunk_size": 16, "num_hidden_layers": 2},
}
_DELTA: dict[str, Any] = {
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 32, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "num_hidden_layers": 2, "layer_types": _RECURRENT_FULL},
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 16}
_LFM2: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}

RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("BambaConfig", _MAMBA2 | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Config", _MAMBA2 | {"mamba_d_ssm": 64, "ssm_in_multiplier": 0.7}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        _MAMBA2
        | {"layer_types": _RECURRENT_FULL, "num_local_experts": 4, "shared_intermediate_size": 16},
    ),
    "jamba": (
        "JambaConfig",
        {
            **{"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
            **{"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4},
            **{"mamba_dt_rank": 4, "mamba_d_state": 8},
        },
    ),
    "lfm2": ("Lfm2Config", _LFM2),
    "lfm2_moe": ("Lfm2MoeConfig", _LFM2 | _EXPERTS | {"num_dense_layers": 1}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
            **{"chunk_size": 16, "n_group": 1, "topk_group": 1, "n_routed_experts": 4},
            **{"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16},
            "initializer_range": 0.1,  # more, and transformers' own steps are 2e-3 off its forward
        },
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", _DELTA | _SHARED),
    "qwen3_5_text": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_next": ("Qwen3NextConfig", _DELTA | _SHARED),
}

# Whose levels go through their recurrence one by one.
BY_LEVELS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **{"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": _RECURRENT_FULL},
            **{"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8},
            **{"qk_rope_head_dim": 4, "v_head_dim": 8, "num_hidden_layers": 2},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
            **_EXPERTS,
        },
    ),
}

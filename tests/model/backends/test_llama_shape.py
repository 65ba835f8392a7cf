"""Which modules compute what Llama's do: found by structure and by results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from paceline.model.backends.native.recognise import as_rms_norm, is_llama_shaped
from paceline.model.probe import ATTENTION, register

VOCAB = 320
LLAMA_SHAPED = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-rope-dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}
OTHERS = {
    "gemma2": ("Gemma2", {"final_logit_softcapping": 5.0}),
    "granite": ("Granite", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "smollm3": (  # its second layer has no rotary embedding
        "SmolLM3",
        {"no_rope_layer_interval": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
}


def build(kind: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A small random model whose parts all matter: no weight is near 0, no norm weight 1."""
    register()
    name, extra = (LLAMA_SHAPED | OTHERS)[kind]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        attn_implementation=ATTENTION,
        **{**({} if kind == "gpt2" else sizes), **extra, **changes},
    )
    torch.manual_seed(1)
    module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    for path, parameter in module.named_parameters():
        if "norm" in path or "ln_" in path:
            parameter.data.uniform_(0.5, 1.5)
        elif parameter.dim() == 1:
            parameter.data.normal_(0, 0.3)
        elif "embed" not in path and "wte" not in path:
            parameter.data.normal_(0, 0.12)
    return module.to(dtype).eval()


@pytest.mark.parametrize("kind", LLAMA_SHAPED)
def test_decoders_of_the_shape_are_found(kind: str) -> None:
    assert is_llama_shaped(build(kind, torch.float32))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_structures_are_not_taken_for_llama(kind: str) -> None:
    assert not is_llama_shaped(build(kind, torch.float32))


def test_a_difference_in_one_layer_is_seen() -> None:
    hf = build("llama", torch.float32)
    assert is_llama_shaped(hf)
    hf.model.layers[1].mlp.act_fn = torch.nn.GELU()
    hf.model.layers[1].mlp.kind = "gelu"
    assert not is_llama_shaped(hf)


class _Scaled(torch.nn.Module):
    """An RMS norm that also doubles: same attributes, other function."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 32))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.rms_norm(x, (32,), self.weight, self.eps)


def test_norms_are_recognised_by_what_they_compute() -> None:
    llama = transformers.models.llama.modeling_llama.LlamaRMSNorm(32, eps=1e-3)
    llama.weight.data.normal_()
    norm = as_rms_norm(llama)
    assert norm is not None
    x = torch.randn(2, 5, 32) * 0.02
    torch.testing.assert_close(norm(x), llama(x))
    gemma = transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm(32)
    gemma.weight.data.normal_()
    norm = as_rms_norm(gemma)
    assert norm is not None
    torch.testing.assert_close(norm(x), gemma(x))
    gemma.bfloat16()
    norm = as_rms_norm(gemma)
    assert norm is not None
    assert torch.equal(norm(x.bfloat16()), gemma(x.bfloat16()))
    assert as_rms_norm(torch.nn.LayerNorm(32)) is None
    assert as_rms_norm(_Scaled()) is None

"""Decoders whose linear layers are split, or whose rotation has another order, in 8 and 4 bits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.model.backends.base import NATIVE, relative_error, trial_logits
from paceline.model.backends.native.split import SplitLinear
from paceline.model.precision import quantise_loaded
from paceline.model.target import CausalModel

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 2},
}


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["phi3", "glm4", "ernie4_5"])
@torch.inference_mode()
def test_quantised_weights(kind: str, precision: str) -> None:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).float().eval()
    for parameter in hf.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    quantise_loaded(kind, hf, precision)
    target = CausalModel(hf, kind)
    wanted = torch.cat(trial_logits(target))
    assert target.use_backend(NATIVE), target.backend_refusal
    assert any(isinstance(module, SplitLinear) for module in hf.modules())
    # Activations are rounded to the same codes, but for the few whose last bits differ.
    assert relative_error(torch.cat(trial_logits(target)), wanted) < 0.02
    target.use_backend("reference")  # torch runs the split layers as well, dense ones in part
    assert relative_error(torch.cat(trial_logits(target)), wanted) < 0.05

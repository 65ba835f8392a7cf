"""Decoders whose linear layers are split, or whose rotation has another order, in 8 and 4 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.model.backends.base import NATIVE, relative_error, trial_logits
from paceline.model.backends.native import model
from paceline.model.backends.native.split import SplitLinear
from paceline.model.precision import quantise_loaded
from paceline.model.quantised.weights import LinearBase
from paceline.model.target import CausalModel

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 2},
}


KINDS = ["phi3", "glm4", "ernie4_5"]


def random_model(kind: str, precision: str | None) -> CausalModel:
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).float().eval()
    for parameter in hf.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    if precision is not None:
        quantise_loaded(kind, hf, precision)
    return CausalModel(hf, kind)


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_quantised_weights(kind: str, precision: str) -> None:
    target = random_model(kind, precision)
    wanted = torch.cat(trial_logits(target))
    assert target.use_backend(NATIVE), target.backend_refusal
    assert any(isinstance(module, SplitLinear) for module in target.hf.modules())
    # Activations are rounded to the same codes, but for the few whose last bits differ.
    assert relative_error(torch.cat(trial_logits(target)), wanted) < 0.02
    target.use_backend("reference")  # torch runs the split layers as well, dense ones in part
    assert relative_error(torch.cat(trial_logits(target)), wanted) < 0.05


@pytest.mark.parametrize("precision", [None, "int4"])
@pytest.mark.parametrize("kind", [*KINDS, "mixtral"])
@torch.inference_mode()
def test_what_cannot_be_described_is_as_it_was(
    kind: str, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_model(kind, precision)
    before = list(target.hf.modules())
    wanted, right = trial_logits(target), model.describe_decoder
    monkeypatch.setattr(model, "describe_decoder", lambda *given: right(*given) and "a reason")
    assert not target.use_backend(NATIVE) and target.backend_refusal == "a reason"
    assert list(target.hf.modules()) == before
    assert all(map(torch.equal, trial_logits(target), wanted))


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_whose_logits_are_wrong_is_loaded_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_model(kind, None).hf.save_pretrained(tmp_path)
    wanted = CausalModel.load(str(tmp_path), "float32", "cpu", backend="reference")
    right = model.describe_decoder
    monkeypatch.setattr(
        model, "describe_decoder", lambda *given: replace(right(*given), logit_scale=3.0)
    )
    target = CausalModel.load(str(tmp_path), "float32", "cpu")
    assert "logits are" in str(target.backend_refusal) and target.requested_backend == "auto"
    assert not any(isinstance(module, LinearBase) for module in target.hf.modules())
    assert all(map(torch.equal, trial_logits(target), trial_logits(wanted)))

"""Layers of experts in 8 and 4 bits: kept, rounded, written and read again, on both backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig

from paceline import LLM, SamplingParams
from paceline.lab.quantize import quantize
from paceline.model.backends.base import NATIVE, REFERENCE, relative_error, trial_logits
from paceline.model.copies import quantised_copy
from paceline.model.precision import is_quantised
from paceline.model.quantised.convert import Experts, scheme_named, split_experts
from paceline.model.quantised.weights import QuantisedLinear
from paceline.model.target import CausalModel


@pytest.fixture(scope="module")
def folder(save: Callable[..., Path]) -> Path:
    """A dense layer, and one of six experts."""
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}
    sizes = {"head_dim": 16, "moe_intermediate_size": 64, "mlp_only_layers": [0]}
    return save(Qwen3MoeConfig, **experts, **sizes)


@pytest.fixture(scope="module", params=[MixtralConfig, GptOssConfig])
def other(request: pytest.FixtureRequest, save: Callable[..., Path]) -> Path:
    """Two layers of three experts, whose checkpoints do not name their matrices."""
    return save(request.param, num_local_experts=3, num_experts_per_tok=2, head_dim=16)


def load(folder: Path, backend: str, **options: Any) -> CausalModel:
    return CausalModel.load(str(folder), dtype="float32", device="cpu", backend=backend, **options)


@torch.inference_mode()
def logits(model: CausalModel) -> torch.Tensor:
    return torch.cat(trial_logits(model))


def check_alike(native: CausalModel, reference: CausalModel) -> None:
    """Up to codes of activations that rounding changes."""
    assert native.backend.name == NATIVE, native.backend_refusal
    pairs = zip(logits(native), logits(reference), strict=True)
    assert median(relative_error(ours, theirs) for ours, theirs in pairs) < 0.03


def of_experts(model: CausalModel) -> list[QuantisedLinear]:
    named = model.hf.named_modules()
    return [m for name, m in named if ".experts." in name and isinstance(m, QuantisedLinear)]


def test_they_compute_what_they_were_made_from(folder: Path) -> None:
    model = load(folder, REFERENCE)
    wanted = logits(model)
    split_experts(model.hf)
    mlp = model.hf.model.layers[1].mlp
    assert isinstance(mlp.experts, Experts)
    assert torch.allclose(logits(model), wanted, atol=1e-4)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_the_kernels_multiply_the_same_codes(folder: Path, precision: str) -> None:
    reference = load(folder, REFERENCE, quantize=precision)
    assert len(of_experts(reference)) == 18
    check_alike(load(folder, NATIVE, quantize=precision), reference)


def test_experts_of_other_models(other: Path, tmp_path: Path) -> None:
    model = load(other, REFERENCE)
    wanted = logits(model)
    split_experts(model.hf)
    assert torch.allclose(logits(model), wanted, atol=1e-4)
    reference = load(other, REFERENCE, quantize="int4")
    assert len(of_experts(reference)) == 18
    check_alike(load(other, NATIVE, quantize="int4"), reference)
    quantize(str(other), tmp_path / "out", scheme_named("w4a16"))
    read = load(tmp_path / "out", REFERENCE)  # only attention is in 4 bits
    assert not of_experts(read) and is_quantised(read.hf)


def test_drafted_text_is_plain_text(folder: Path) -> None:
    """Rows that share experts have the bits that they have alone."""
    prompts = ["Once upon a time", "The quick brown fox. The quick brown", "Two pigs"]
    asked = SamplingParams(max_tokens=24, ignore_eos=True)
    options = {"dtype": "float32", "quantize": "int4", "draft_length": 5}
    alone = LLM(str(folder), draft="none", **options)
    wanted = [alone.generate(prompt, asked)[0].token_ids for prompt in prompts]
    drafted = LLM(str(folder), draft="ngram", **options).generate(prompts, asked)
    assert [one.token_ids for one in drafted] == wanted
    assert sum(one.stats.drafted_tokens for one in drafted) > 0


def test_the_form_of_four_bits_has_them_in_four_bits(folder: Path) -> None:
    reference = quantised_copy(load(folder, REFERENCE), "int4")
    assert len(of_experts(reference)) == 18
    check_alike(quantised_copy(load(folder, NATIVE), "int4"), reference)


@pytest.mark.parametrize("calibrated", [False, True], ids=["nearest", "GPTQ"])
def test_what_was_written_is_read_again(folder: Path, tmp_path: Path, calibrated: bool) -> None:
    text = tmp_path / "text.jsonl"
    lines = (
        json.dumps({"text": f"Once there were {n} pigs and {7 * n} wolves."}) for n in range(40)
    )
    text.write_text("\n".join(lines), encoding="utf-8")
    scheme = scheme_named("w4a16")
    record, _ = quantize(str(folder), tmp_path / "out", scheme, text if calibrated else None, 600)
    assert record["layers"] == 2 * 4 + 3 + 18
    read = load(tmp_path / "out", REFERENCE)
    assert len(of_experts(read)) == 18 and {m.quantised.bits for m in of_experts(read)} == {4}
    check_alike(load(tmp_path / "out", NATIVE), read)

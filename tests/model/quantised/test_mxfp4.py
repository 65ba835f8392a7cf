"""GPT-OSS as it is published: experts in MXFP4, read as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline import LLM, SamplingParams
from paceline.build import EngineOptions
from paceline.errors import ModelLoadError
from paceline.lab import recommend
from paceline.lab.doctor.machine import Setting, held_bits, weight_bytes
from paceline.lab.doctor.models import describe, read_files
from paceline.model.backends.base import NATIVE, REFERENCE, relative_error, trial_logits
from paceline.model.quantised.mxfp4 import MXFP4_BYTES, Mxfp4Linear
from paceline.model.target import CausalModel

EXPERTS = 4
Tensors = dict[str, torch.Tensor]
NAMES = ("gate_up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(save: Callable[..., Path]) -> Path:
    folder = save(GptOssConfig, num_local_experts=EXPERTS, num_experts_per_tok=2, head_dim=16)
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors: Tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for key in [key for key in tensors if key.rpartition(".")[2] in NAMES]:
        count, inputs, rows = tensors.pop(key).shape
        shape = count, rows, inputs // 32
        blocks = torch.randint(256, (*shape, 16), generator=generator)
        scales = torch.randint(121, 125, shape, generator=generator)  # 2**-6 to 2**-3
        tensors |= {f"{key}_blocks": blocks.byte(), f"{key}_scales": scales.byte()}
    save_file(tensors, path, {"format": "pt"})
    options = json.loads(config.read_text(encoding="utf-8"))
    options["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    config.write_text(json.dumps(options), encoding="utf-8")
    return folder


def load(folder: Path, backend: str, **options: Any) -> CausalModel:
    return CausalModel.load(str(folder), dtype="float32", device="cpu", backend=backend, **options)


def test_every_expert_has_the_weights_that_transformers_reads(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    model = load(folder, REFERENCE)
    for number, layer in enumerate(model.hf.model.layers):
        for name in NAMES:
            key = f"model.layers.{number}.mlp.experts.{name}"
            packed = tensors[f"{key}_blocks"], tensors[f"{key}_scales"]
            wanted = convert_moe_packed_tensors(*packed, dtype=torch.float32)
            for expert, matrix in zip(layer.mlp.experts, wanted, strict=True):
                parts: Any = {"gate_proj": matrix[:, ::2], "up_proj": matrix[:, 1::2]}
                for part, numbers in (parts if name == NAMES[0] else {name: matrix}).items():
                    linear = expert.get_submodule(part)
                    assert isinstance(linear, Mxfp4Linear) and linear.quantised.e2m1
                    assert torch.equal(linear.weight, numbers.t())


@torch.inference_mode()
def test_logits_are_those_of_the_dequantised_model_and_the_kernels(folder: Path) -> None:
    quantised = torch.cat(trial_logits(load(folder, REFERENCE)))
    dense = torch.cat(trial_logits(load(folder, REFERENCE, quantize="none")))
    native = load(folder, NATIVE)
    assert native.backend.name == NATIVE, native.backend_refusal
    kernels = torch.cat(trial_logits(native))
    # Experts take activations of 8 bits, where a rounding difference may move a code.
    for ours, theirs, most in ((quantised, dense, 0.05), (kernels, quantised, 0.03)):
        assert 0 < relative_error(ours, theirs) < most


def test_drafted_text_is_plain_text(folder: Path) -> None:
    prompts = ["Once upon a time", "The quick brown fox. The quick brown", "Two pigs"]
    asked = SamplingParams(max_tokens=24, ignore_eos=True)
    alone = LLM(str(folder), draft="none")
    wanted = [alone.generate(prompt, asked)[0].token_ids for prompt in prompts]
    drafted = LLM(str(folder), draft="ngram", draft_length=5).generate(prompts, asked)
    assert [one.token_ids for one in drafted] == wanted
    assert sum(one.stats.drafted_tokens for one in drafted) > 0


KEY = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{KEY}_scales"), "do not fit together"),
        (lambda t: t.update({f"{KEY}_scales": t[f"{KEY}_scales"][:, 1:]}), "do not fit together"),
        (lambda t: t.update({f"{KEY}_blocks": t[f"{KEY}_blocks"].float()}), "do not fit together"),
        (lambda t: t[f"{KEY}_scales"].fill_(255), f"{KEY}_scales has a scale that is no number"),
        (lambda t: [t.pop(key) for key in list(t) if "_blocks" in key], "has none"),
    ],
)
def test_damaged_files_are_reported(
    folder: Path, tmp_path: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, REFERENCE)


def test_doctor_and_recommend_know_what_is_in_four_bits(folder: Path) -> None:
    model, _ = describe(read_files(str(folder)), "target")
    assert model is not None
    setting = Setting.of(EngineOptions(device="cpu"))
    assert held_bits(model, setting) == 4
    experts = EXPERTS * 2 * 3 * 64 * 96 * MXFP4_BYTES  # two of four are not read in a step
    embedding = model.vocab_size * model.hidden_size * setting.width
    read = weight_bytes(model, setting) - embedding - experts / 2
    assert recommend._read_bytes(model, setting) == pytest.approx(read, rel=1e-3)  # biases

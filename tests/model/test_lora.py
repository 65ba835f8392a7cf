"""What is read of an adapter's folder, and what is refused with one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import tiny_pair
from safetensors.torch import load_file, save_file

from paceline.errors import ConfigError, ModelLoadError, PacelineError
from paceline.model.lora import read_adapter
from paceline.model.target import CausalModel
from support.engine_models import random_llama
from support.made_adapters import write_adapter

QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(random_llama(), "random")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_llama().save_pretrained(tmp_path / "model")
    return Path(write_adapter(tmp_path / "one", str(tmp_path / "model")))


def configured(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def test_one_made_for_a_model_that_also_reads_images(model: CausalModel, folder: Path) -> None:
    wanted = read_adapter("one", str(folder), model).pairs

    def renamed(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "lm_head" not in name]:
            whole = name.replace(
                "base_model.model.model.", "base_model.model.model.language_model."
            )
            tensors[whole] = tensors.pop(name)

    changed(folder, renamed)
    assert read_adapter("one", str(folder), model).pairs.keys() == wanted.keys()


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": 12}}, 3.0),
        ({"lora_alpha": 8, "alpha_pattern": {"layers.1.self_attn.q_proj": 12}}, 2.0),
    ],
)
def test_alpha(model: CausalModel, folder: Path, config: dict[str, Any], scale: float) -> None:
    before = load_file(folder / "adapter_model.safetensors")[f"{QUERY}B.weight"]
    configured(folder, **config)
    adapter = read_adapter("one", str(folder), model)
    a, b = adapter.pairs["model.layers.0.self_attn.q_proj"]
    assert torch.allclose(b, scale * before) and len(a) == 4
    assert len(adapter.pairs) == 2 * 7 + 1


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"use_dora": True}, "has use_dora = true; only LoRA of linear modules"),
        ({"bias": "all"}, 'has bias = "all"'),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "has target_parameters"),
        ({"trainable_token_indices": [3]}, "has trainable_token_indices"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        ({"peft_type": "IA3"}, "is not of a LoRA adapter"),
        ({"lora_alpha": "much"}, "scales B of .* by nan, .*; correct adapter_config.json"),
        ({"lora_alpha": 1e300}, r"scales B of .* by 2.5e\+299, which torch.float32 does not hold"),
        ({"alpha_pattern": {"(": 3}}, "lora_alpha or alpha_pattern"),
        ({"alpha_pattern": ["q_proj"]}, "lora_alpha or alpha_pattern"),
    ],
)
def test_refused_options(
    model: CausalModel, folder: Path, config: dict[str, Any], line: str
) -> None:
    configured(folder, **config)
    with pytest.raises(ConfigError, match=line):
        read_adapter("one", str(folder), model)


def _widened(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{QUERY}A.weight"] = torch.zeros(4, 33)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t.pop(f"{QUERY}A.weight"), "one of lora_A and lora_B of model.layers.0"),
        (lambda t: t.update({f"{QUERY}magnitude_vector": torch.ones(2)}), "no LoRA weight"),
        (_widened, "maps 33 inputs .* has 32 and 32 there: it was trained for another model"),
        (lambda t: t[f"{QUERY}A.weight"].fill_(float("nan")), "holds NaN"),
        (
            lambda t: t.update(
                {f"{QUERY}A.weight": torch.ones(65, 32), f"{QUERY}B.weight": torch.ones(32, 65)}
            ),
            "ranks from 1 to 64 are served",
        ),
        (
            lambda t: t.update(
                {k.replace("q_proj", "norm"): v.clone() for k, v in t.items() if "q_proj" in k}
            ),
            "which is no linear module of random",
        ),
        (
            lambda t: t.update({f"{QUERY}A.weight": torch.tensor(1.0)}),
            r"are \[\] and \[32, 4\]; ranks from",
        ),
        (lambda t: t.clear(), "holds no weights"),
    ],
)
def test_refused_weights(
    model: CausalModel,
    folder: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    line: str,
) -> None:
    changed(folder, change)
    with pytest.raises(PacelineError, match=line) as error:
        read_adapter("one", str(folder), model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("mlp.experts.1.down_proj", "which is part of fused experts of moe; merge it"),
        ("mlp.gate", "which is no linear module of moe; merge it"),
    ],
)
def test_what_is_no_linear_layer_to_peft(tmp_path: Path, module: str, line: str) -> None:
    """Experts in one weight, as their single layers were named before, and their router."""
    moe, _ = tiny_pair("mixtral")
    moe.name = "moe"
    key = f"base_model.model.model.layers.0.{module}.lora_"
    tensors = {f"{key}A.weight": torch.ones(2, 32), f"{key}B.weight": torch.ones(4, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ConfigError, match=line):
        read_adapter("one", str(tmp_path), moe)


def test_refused_folders(model: CausalModel, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot read .*adapter_config"):
        read_adapter("one", str(tmp_path / "none"), model)
    (folder / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(ModelLoadError, match="is damaged"):
        read_adapter("one", str(folder), model)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no adapter_model"):
        read_adapter("one", str(folder), model)
    (folder / "adapter_config.json").write_text("[")
    with pytest.raises(ConfigError, match="is not of a LoRA adapter"):
        read_adapter("one", str(folder), model)

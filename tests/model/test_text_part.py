"""Models that also read images: their text is that of the whole model, which transformers runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_every_architecture import alone, check, prompts, random_model, together
from tiny_architectures import VOCAB, tiny_config

from paceline.model.backends.base import NATIVE
from paceline.model.target import CausalModel

_TEXT: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 128, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2},
}
_VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
# Of each model: its name in transformers, and configs of text and images.
_WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", {"model_type": "gemma3_text", "sliding_window": 6}, {}),
    "internvl": ("InternVL", {"model_type": "qwen2"}, {"image_size": [28, 28]}),
    "llava": ("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model"}),
    "mistral3": ("Mistral3", {"model_type": "mistral"}, {"model_type": "pixtral", "head_dim": 16}),
    "ministral3": ("Mistral3", {"model_type": "ministral3"}, {"model_type": "pixtral"}),
}


@pytest.fixture(params=_WHOLE)
def whole(request: pytest.FixtureRequest) -> Any:
    name, text, vision = _WHOLE[request.param]
    configs = {"text_config": _TEXT | text, "vision_config": _VISION | vision}
    config = getattr(transformers, f"{name}Config")(**configs)
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize("newer", [False, True], ids=["older names", "newer names"])
def test_the_text_is_that_of_the_whole(whole: Any, newer: bool, tmp_path: Path) -> None:
    whole.save_pretrained(tmp_path)
    if newer:
        file = tmp_path / "model.safetensors"
        renamed = {
            name.replace("language_model.model.", "model.language_model."): tensor
            for name, tensor in load_file(file).items()
        }
        save_file(renamed, file, {"format": "pt"})
    target = CausalModel.load(str(tmp_path), dtype="float32", device="cpu")
    assert type(target.hf).__name__.endswith("ForCausalLM")
    assert target.backend.name == NATIVE, target.backend_refusal
    for prompt, answer in zip(prompts(), together(target), strict=True):
        check(prompt, answer, *alone(whole, prompt, whole=False))


def test_a_model_that_is_loaded_whole(tmp_path: Path) -> None:
    """Fuyu's class for text is that of the whole: its decoder keeps its names."""
    model = random_model(tiny_config("fuyu"))
    model.save_pretrained(tmp_path)
    target = CausalModel.load(str(tmp_path), dtype="float32", device="cpu")
    for prompt, answer in zip(prompts(), together(target), strict=True):
        check(prompt, answer, *alone(model, prompt, whole=False))

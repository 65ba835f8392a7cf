"""Random LoRA adapters in peft's layout, and models with one merged into their weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    target: str,
    *,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.3,
    modules: Sequence[str] = (*MODULES, "lm_head"),
    **config: Any,
) -> str:
    """An adapter of random weights for a model on disk; ``size``: of the changes, beside the
    weights' own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules:
            outputs, inputs = module.weight.shape
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) * size * module.weight.std().item()
            key = f"base_model.model.{name}.lora_"
            tensors |= {f"{key}A.weight": a, f"{key}B.weight": b * (inputs / rank) ** 0.5}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return str(folder)


def write_merged(folder: Path, target: str, adapter: str, scale: float = 1.0) -> str:
    """The model with ``scale`` B A added to its weights, in float32, and its tokenizer."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    if model.config.tie_word_embeddings:  # the adapter changes the head alone
        model.config.tie_word_embeddings = False
        head = model.lm_head.weight.detach().clone()
        model.lm_head.weight = torch.nn.Parameter(head)
    tensors = load_file(Path(adapter) / "adapter_model.safetensors")
    with torch.no_grad():
        for key in tensors:
            name, part, _ = key.removeprefix("base_model.model.").rsplit(".", 2)
            if part == "lora_A":
                b = tensors[key.replace("lora_A", "lora_B")]
                model.get_submodule(name).weight += scale * b @ tensors[key]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return str(folder)

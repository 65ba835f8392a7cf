"""Random MTP layers in the layouts of published checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Names of the layer's tensors, and of its embedding norm, hidden norm, projection and last norm;
# {n} is the target's number of layers.
LAYOUTS = {
    "deepseek": (
        "model.layers.{n}.",
        tuple(
            f"model.layers.{{n}}.{part}"
            for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        ),
    ),
    "qwen3_next": (
        "mtp.layers.0.",
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    ),
    "mimo": (
        "model.mtp_layers.0.",
        tuple(
            f"model.mtp_layers.0.{part}"
            for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ),
    ),
}


def deeper(config: Any) -> Any:
    """A random module with one layer more than ``config`` says; the last is the MTP layer's."""
    from transformers import AutoModelForCausalLM

    more = copy.deepcopy(config)
    more.num_hidden_layers += 1
    if getattr(more, "layer_types", None):
        more.layer_types = [*more.layer_types, more.layer_types[-1]]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return AutoModelForCausalLM.from_config(more, attn_implementation="eager").float().eval()


def parts_of(config: Any) -> dict[str, torch.Tensor]:
    """Random weights around the layer, by DeepSeek's names."""
    size = config.hidden_size
    draws = torch.Generator().manual_seed(6)
    norms = {
        name: 1 + 0.2 * torch.randn(size, generator=draws) for name in ("enorm", "hnorm", "norm")
    }
    return norms | {"eh_proj": 0.3 * torch.randn(size, 2 * size, generator=draws)}


def write_mtp(folder: Path, config: Any, layout: str = "deepseek", whole: bool = False) -> str:
    """A folder with an MTP layer for a model of ``config``; ``whole``: with the model's weights."""
    count = config.num_hidden_layers
    with TemporaryDirectory() as saved:
        deeper(config).save_pretrained(saved)
        tensors = load_file(Path(saved) / "model.safetensors")
    last = f"model.layers.{count}."
    kept = {key: value for key, value in tensors.items() if whole and not key.startswith(last)}
    prefix, names = LAYOUTS[layout]
    for key, value in tensors.items():
        if key.startswith(last):
            kept[prefix.format(n=count) + key.removeprefix(last)] = value
    parts = parts_of(config)
    for name, part in zip(names, ("enorm", "hnorm", "eh_proj", "norm"), strict=True):
        kept[f"{name.format(n=count)}.weight"] = parts[part]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    if whole:
        config.architectures = [type(deeper(config)).__name__]
        config.save_pretrained(folder)
    else:
        (folder / "config.json").write_text(json.dumps({"num_nextn_predict_layers": 1}))
    return str(folder)

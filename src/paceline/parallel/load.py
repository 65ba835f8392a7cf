"""Which models ranks can share, and the part of one that a rank loads.

Transformers shards: a model's tensor-parallel plan says which weights are cut by rows or columns,
and every rank reads its own slices of the checkpoint only.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from paceline.errors import ConfigError, UnsupportedModelError
from paceline.model.gguf import gguf_file
from paceline.model.hub import fetched
from paceline.model.loading import check_folder, load_module, read_config
from paceline.model.precision import quantization_of
from paceline.model.target import CausalModel

_HEADS = ("q_proj", "k_proj", "v_proj")  # cut by columns, they are cut between heads


def load_part(name: str, dtype: str, device: torch.device, size: int) -> CausalModel:
    """This rank's part; all ranks must call, as they look at the model together."""
    from transformers.distributed import DistributedConfig

    module = load_module(name, dtype, device, distributed_config=DistributedConfig(tp_size=size))
    del module.config.distributed_config  # how it is run, and not what it is
    return CausalModel(module, name)


def check_shareable(name: str, size: int) -> None:
    """Refuse what cannot be shared by so many ranks, by name, before processes are started.

    Raises ConfigError, UnsupportedModelError and ModelLoadError.
    """
    path = fetched(name)
    asked = f"tensor_parallel={size}"
    if gguf_file(path) is not None:
        raise ConfigError(
            f"{asked}: {name} is a GGUF file, which ranks cannot read parts of; "
            "give the model in safetensors"
        )
    check_folder(name, Path(path))
    config = read_config(name, path)
    if quantization_of(config) is not None:
        raise ConfigError(
            f"{asked}: {name} is quantised, and its groups of weights are not cut between ranks; "
            "give the model that it was made from"
        )
    text = config.get_text_config(decoder=True)
    plan: dict[str, str] = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModelError(
            f"{config.model_type} has no tensor-parallel plan in transformers, so ranks cannot "
            f"share it; run {name} on one device"
        )
    cut = {key.rpartition(".")[2] for key, style in plan.items() if style == "colwise"}
    if not cut.intersection(_HEADS):
        return  # every rank has all heads
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or shared % size:
        most = math.gcd(heads, shared)
        fitting = [str(n) for n in range(2, most + 1) if most % n == 0]
        advice = f"use {' or '.join(fitting)}" if fitting else "it can only run on one device"
        raise ConfigError(
            f"{name} has {heads} attention heads over {shared} KV heads, which {size} ranks "
            f"cannot share evenly; {advice}"
        )

"""Fields of a quantised checkpoint's config: known, saying nothing, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import UnsupportedModelError
from paceline.model import loading
from paceline.model.loading import load_module
from paceline.model.quantised.formats import is_supported
from paceline.model.quantised.weights import QuantisedLinear

LAYER = "model.layers.0.self_attn.q_proj"


def with_fields(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "config.json"
    options = json.loads(file.read_text(encoding="utf-8"))
    change(options["quantization_config"])
    file.write_text(json.dumps(options), encoding="utf-8")


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (
            "transform_config, which is not read",
            lambda q: q.update(
                transform_config={"config_groups": {"R4": {"type": "hadamard", "apply": []}}}
            ),
        ),
        ("sparsity_config", lambda q: q.update(sparsity_config={"format": "sparse-24-bitmask"})),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fields_without_which_weights_are_another_model_are_named(
    four: Path,
    place: str,
    change: Callable[[dict[str, Any]], None],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on devices where the format's library would read them: it passes over them, too."""
    monkeypatch.setattr(loading, "resolve_device", torch.device)  # which would refuse "meta"
    with_fields(four, change)
    with pytest.raises(UnsupportedModelError, match=f"sets {place}.*; take a checkpoint"):
        load_module(str(four), "float32", device)


def test_fields_that_say_nothing_are_no_reason(four: Path) -> None:
    """As published checkpoints have them."""

    def change(config: dict[str, Any]) -> None:
        config |= {
            "version": "0.15.0",
            "global_compression_ratio": 1.4,
            "kv_cache_scheme": None,
            "sparsity_config": {"format": "dense", "targets": [], "global_sparsity": 0.1},
            "transform_config": {"config_groups": {}},
        }
        config["config_groups"]["group_0"]["weights"]["observer_kwargs"] = {}

    with_fields(four, change)
    modules = load_module(str(four), "float32", "cpu").modules()
    assert sum(isinstance(module, QuantisedLinear) for module in modules) == 14


def test_an_order_of_inputs_is_refused_in_this_layout_too(four: Path) -> None:
    tensors = load_file(four / "model.safetensors")
    tensors[f"{LAYER}.weight_g_idx"] = torch.arange(64).flip(0).to(torch.int32) // 32
    save_file(tensors, four / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=f"{LAYER} has its inputs in an order"):
        load_module(str(four), "float32", "cpu")


@pytest.mark.parametrize(
    "change",
    [
        {"config_groups": {"W4A16": ["Linear"]}},
        {"format": "marlin-24"},
        {"config_groups": {"group_0": {"format": "nvfp4-pack-quantized"}}},
        {"config_groups": "no object"},  # transformers says that in one line
        {"config_groups": {"group_0": {"weights": "no object"}}},
    ],
)
def test_layouts_that_are_not_read_are_left_to_their_library(change: dict[str, Any]) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {}, **change}
    assert not is_supported(config)

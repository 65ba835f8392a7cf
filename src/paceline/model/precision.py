"""Models of eight and four bits: quantised checkpoints, and models quantised when loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.stages import info, stage
from paceline.errors import ConfigError, ModelLoadError
from paceline.model.quantised.convert import Scheme, quantise_module
from paceline.model.quantised.formats import is_kept, owned, quantised_weights
from paceline.model.quantised.rounding import round_to_nearest
from paceline.model.quantised.weights import ROW_GROUP, QuantisedLinear, QuantisedWeight

# What transformers asks of the installation for formats that are left to it.
_LIBRARIES = {
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "fp8": "kernels",
    "hqq": "hqq",
    "quanto": "optimum-quanto",
}


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The ``quantization_config`` of a model's config, or None."""
    options = getattr(config, "quantization_config", None)
    if options is None:
        return None
    return dict(options if isinstance(options, Mapping) else options.to_dict())


def library_of(options: Mapping[str, Any]) -> str:
    """The package that transformers reads such a checkpoint with, as pip knows it."""
    method = str(options.get("quant_method"))
    return _LIBRARIES.get(method, method)


def keeps(options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether such weights stay as they are, multiplied by our own arithmetic: on a CPU."""
    return device.type == "cpu" and is_kept(options)


def dense_tensors(
    name: str, files: list[Path], options: Mapping[str, Any], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, QuantisedWeight]]:
    """All tensors of a checkpoint as a plain model has them, and the quantised weights by layer.

    The plain form of a quantised weight is what its codes stand for. Raises ModelLoadError.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            tensors |= load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(
            f"a weights file of {name} is damaged ({error}); download or copy it again"
        ) from None
    weights = quantised_weights(options, tensors)
    gone = {f"{layer}{ending}" for layer in weights for ending in owned(options)}
    plain = {key: tensor for key, tensor in tensors.items() if key not in gone}
    plain |= {f"{layer}.weight": weight.dense(dtype) for layer, weight in weights.items()}
    return plain, weights


def put_back(name: str, hf: Any, weights: Mapping[str, QuantisedWeight]) -> None:
    """Let the layers of a plain model multiply by their quantised weights again.

    A layer whose groups do not fit our arithmetic stays dequantised, which is said.
    """
    left = 0
    for layer, weight in weights.items():
        try:
            module = hf.get_submodule(layer)
        except AttributeError:
            module = None
        if type(module) is not nn.Linear or not weight.fits:
            left += 1
            continue
        hf.set_submodule(layer, QuantisedLinear(weight, module.bias))
    if left:
        info(
            f"{name}: {left} of {len(weights)} quantised layers are dequantised, as their shapes "
            f"do not divide into groups of {ROW_GROUP}"
        )


def quantise_loaded(name: str, hf: Any, precision: str) -> Any:
    """Quantise a module that was just loaded, the head in 8 bits; "none": dequantise it.

    Raises ConfigError.
    """
    if precision == "none":
        dequantise(hf)
        return hf
    if is_quantised(hf):
        raise ConfigError(
            f"{name} is quantised already, and quantize={precision!r} would round it again; leave "
            "that out, or give the model it was made from"
        )
    if hf.device.type != "cpu":
        raise ConfigError(
            f"quantize={precision!r} works on a CPU, not on {hf.device}; for a GPU write a "
            "checkpoint by paceline quantize and serve that"
        )
    with stage(f"quantising {name} to {precision}"):
        quantise_module(hf, Scheme(precision, head="int8", finer=True), rounder=round_to_nearest)
    return hf


def dequantise(hf: Any) -> int:
    """Plain layers of the same numbers in place of quantised ones; returns how many there were."""
    layers = [(name, m) for name, m in hf.named_modules() if isinstance(m, QuantisedLinear)]
    for name, module in layers:
        hf.set_submodule(name, module.plain().to(hf.dtype))
    return len(layers)


def is_quantised(hf: nn.Module) -> bool:
    """Whether a layer multiplies by quantised weights."""
    return any(isinstance(module, QuantisedLinear) for module in hf.modules())

"""Models of eight and four bits: quantised checkpoints, models quantised when loaded, and what the
matrices of a loaded model are held as."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.stages import info, stage
from paceline.errors import ConfigError, ModelLoadError
from paceline.model.quantised.convert import EIGHT_BIT_GROUP, Scheme, quantise_module
from paceline.model.quantised.formats import is_kept, owned, quantised_weights
from paceline.model.quantised.weights import (
    ROW_GROUP,
    HeldLinear,
    HeldMatrix,
    QuantisedLinear,
    QuantisedWeight,
    is_plain,
)

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
        hf.set_submodule(layer, QuantisedLinear(weight.of_layer(layer), module.bias))
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
        quantise_module(hf, Scheme(precision, head="int8", finer=True))
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


# -- what matrices are held as -----------------------------------------------------------------

# Bytes of a number: in four bits there are a scale and an offset for a group of 32, in eight a
# scale for 64, in half precision for the kernels. Without these a code has a byte to itself, and
# its scale four.
_KERNELS = {"int8": 1.0 + 2 / EIGHT_BIT_GROUP, "int4": 0.5 + 2 * 2 / ROW_GROUP}
_READABLE = {"int8": 1.0 + 4 / EIGHT_BIT_GROUP, "int4": 1.0 + 2 * 4 / ROW_GROUP}


def _held(hf: nn.Module) -> Iterator[tuple[Any, HeldMatrix]]:
    for module in hf.modules():
        if isinstance(module, HeldLinear):
            yield module, module.held()
        elif isinstance(module, nn.Linear):
            numbers = module.weight.detach()
            elements, size = module.in_features * module.out_features, numbers.nbytes
            bits = 8 * size // max(1, elements)  # of a library's own layer
            if is_plain(numbers) and numbers.is_floating_point():
                elements, bits = numbers.numel(), 8 * numbers.dtype.itemsize
            yield module, HeldMatrix(bits, elements, size)


def held_matrices(hf: nn.Module) -> Iterator[HeldMatrix]:
    """Every linear layer of a model once, in any layout; embeddings, of which a step reads a few
    rows, are none."""
    return (held for _, held in _held(hf))


def rounded_bytes(hf: Any, precision: str, width: int, readable: bool = False) -> int:
    """Of a model's matrices rounded to ``precision``, in memory; the head in 8 bits, and what has
    no groups in numbers of ``width`` bytes. ``readable``: without the kernels' layout."""
    widths = _READABLE if readable else _KERNELS
    head, total = hf.get_output_embeddings(), 0.0
    for module, held in _held(hf):
        number = widths["int8" if module is head else precision]
        total += (width if module.in_features % ROW_GROUP else number) * held.elements
    return int(total)


def usual_bits(hf: nn.Module) -> int:
    """Bits in which most numbers of the matrices are held; 0 without any."""
    counts: dict[int, int] = {}
    for held in held_matrices(hf):
        counts[held.bits] = counts.get(held.bits, 0) + held.elements
    return max(counts, key=lambda bits: counts[bits], default=0)


def is_few(hf: nn.Module) -> bool:
    """Whether most numbers are held in as few bits as only quantised weights have."""
    return 0 < usual_bits(hf) <= 8

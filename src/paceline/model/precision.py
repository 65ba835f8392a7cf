"""Models in 8 and 4 bits: checkpoints, models quantised when loaded, sizes of matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.stages import info, stage
from paceline.errors import ConfigError
from paceline.model.quantised.convert import EIGHT_BIT_GROUP, Scheme, quantise_module, split_experts
from paceline.model.quantised.formats import is_supported, quantised_weights, tensor_suffixes
from paceline.model.quantised.weights import (
    ROW_GROUP,
    LinearBase,
    MatrixSize,
    QuantisedLinear,
    QuantisedWeight,
    is_plain,
)
from paceline.model.tensorfile import load_tensors
from paceline.model.text_part import plain_name

_LIBRARIES = {"fp8": "kernels", "quanto": "optimum-quanto"}  # others have their format's name


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


def stays_quantised(options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether such weights stay quantised and are multiplied by our own arithmetic: on a CPU."""
    return device.type == "cpu" and is_supported(options)


def dense_tensors(
    files: list[Path], options: Mapping[str, Any], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, QuantisedWeight]]:
    """A checkpoint's tensors, dequantised, and quantised weights. Raises ModelLoadError."""
    tensors = {key: tensor for file in files for key, tensor in load_tensors(file).items()}
    weights = quantised_weights(options, tensors)
    packed = {f"{layer}{ending}" for layer in weights for ending in tensor_suffixes(options)}
    plain = {key: tensor for key, tensor in tensors.items() if key not in packed}
    plain |= {f"{layer}.weight": weight.dense(dtype) for layer, weight in weights.items()}
    return plain, weights


def restore_quantised(name: str, hf: Any, weights: Mapping[str, QuantisedWeight]) -> None:
    """Put quantised weights into a plain model; a line says how many layers do not take them."""
    left, modules = 0, dict(split_experts(hf).named_modules(remove_duplicate=False))
    for stated, weight in weights.items():
        layer = stated if stated in modules else plain_name(stated)
        module = modules.get(layer)
        if type(module) is not nn.Linear or not weight.has_supported_groups:
            left += 1
            continue
        hf.set_submodule(layer, QuantisedLinear(weight.for_layer(layer), module.bias))
    if left:
        info(
            f"{name}: {left} of {len(weights)} quantised layers are dequantised, as their shapes "
            f"do not divide into groups of {ROW_GROUP}"
        )


def quantise_loaded(name: str, hf: Any, precision: str) -> Any:
    """Quantise a loaded module, its head in 8 bits; "none" dequantises it. Raises ConfigError."""
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
    """Replace quantised layers by plain ones of the same numbers; returns how many there were."""
    layers = [(name, m) for name, m in hf.named_modules() if isinstance(m, QuantisedLinear)]
    for name, module in layers:
        hf.set_submodule(name, module.plain().to(hf.dtype))
    return len(layers)


def is_quantised(hf: nn.Module) -> bool:
    """Whether a layer multiplies by quantised weights."""
    return any(isinstance(module, QuantisedLinear) for module in hf.modules())


# -- sizes of matrices -------------------------------------------------------------------------

# Bytes of a number with its share of scales: in four bits a scale and an offset per 32, in eight a
# scale per 64, in half precision for the kernels; elsewhere codes are bytes and scales float32.
_KERNELS = {"int8": 1.0 + 2 / EIGHT_BIT_GROUP, "int4": 0.5 + 2 * 2 / ROW_GROUP}
_READABLE = {"int8": 1.0 + 4 / EIGHT_BIT_GROUP, "int4": 1.0 + 2 * 4 / ROW_GROUP}


def _linears(hf: nn.Module) -> Iterator[tuple[Any, MatrixSize]]:
    for module in hf.modules():
        if isinstance(module, LinearBase):
            yield module, module.matrix_size()
        elif isinstance(module, nn.Linear):
            numbers = module.weight.detach()
            elements, size = module.in_features * module.out_features, numbers.nbytes
            bits = 8 * size // max(1, elements)  # of a library's own layer
            if is_plain(numbers) and numbers.is_floating_point():
                elements, bits = numbers.numel(), 8 * numbers.dtype.itemsize
            yield module, MatrixSize(bits, elements, size)


def matrix_sizes(hf: nn.Module) -> Iterator[MatrixSize]:
    """Of all linear layers, in any layout. Not of embeddings, of which a step reads a few rows."""
    return (size for _, size in _linears(hf))


def rounded_bytes(hf: Any, precision: str, width: int, readable: bool = False) -> int:
    """Memory of a model's matrices in ``precision``, the head in 8 bits, those that do not divide
    into groups in ``width`` bytes a number. ``readable``: not in the kernels' layout."""
    widths = _READABLE if readable else _KERNELS
    head, total = hf.get_output_embeddings(), 0.0
    for module, size in _linears(hf):
        number = widths["int8" if module is head else precision]
        total += (width if module.in_features % ROW_GROUP else number) * size.elements
    return int(total)


def usual_bits(hf: nn.Module) -> int:
    """Bits of most numbers of the matrices; 0 without any."""
    counts = Counter[int]()
    for size in matrix_sizes(hf):
        counts[size.bits] += size.elements
    return max(counts, key=counts.__getitem__, default=0)


def is_few(hf: nn.Module) -> bool:
    """Whether most numbers have at most 8 bits, which only quantised weights have."""
    return 0 < usual_bits(hf) <= 8

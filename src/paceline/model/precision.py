"""Models in 8 and 4 bits: quantised checkpoints, quantising at load time, sizes of matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.stages import info, stage
from paceline.errors import ConfigError, ModelLoadError
from paceline.model.quantised.convert import EIGHT_BIT_GROUP, Scheme, quantise_module, split_experts
from paceline.model.quantised.formats import is_supported, quantised_weights, tensor_suffixes
from paceline.model.quantised.mxfp4 import METHOD as MXFP4
from paceline.model.quantised.mxfp4 import Mxfp4Weight, expert_weights
from paceline.model.quantised.weights import (
    ROW_GROUP,
    Float8Weight,
    LinearBase,
    MatrixSize,
    QuantisedLinear,
    QuantisedWeight,
    is_plain,
)
from paceline.model.tensorfile import load_tensors
from paceline.model.text_part import plain_name

StoredWeight = QuantisedWeight | Mxfp4Weight
_LIBRARIES = {"fp8": "kernels", "quanto": "optimum-quanto"}  # others are named as their format


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The ``quantization_config`` in a model's config, or None."""
    options = getattr(config, "quantization_config", None)
    if options is None:
        return None
    return dict(options if isinstance(options, Mapping) else options.to_dict())


def library_of(options: Mapping[str, Any]) -> str:
    """The pip name of the package with which transformers reads such a checkpoint."""
    method = str(options.get("quant_method"))
    return _LIBRARIES.get(method, method)


def stays_quantised(options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether a checkpoint's weights stay quantised in our layers: on a CPU, in known formats."""
    return device.type == "cpu" and is_supported(options)


def dense_tensors(
    tensors: Mapping[str, torch.Tensor], options: Mapping[str, Any], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Mapping[str, QuantisedWeight | Float8Weight]]:
    """A checkpoint's tensors, dequantised, and its quantised weights. Raises ModelLoadError."""
    matrices = quantised_weights(options, tensors)
    packed = {f"{layer}{ending}" for layer in matrices for ending in tensor_suffixes(options)}
    plain = {key: tensor for key, tensor in tensors.items() if key not in packed}
    plain |= {f"{layer}.weight": weight.dense(dtype) for layer, weight in matrices.items()}
    return plain, matrices


def load_quantised(
    files: list[Path], options: Mapping[str, Any], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Mapping[str, StoredWeight]]:
    """Like ``dense_tensors``, for the tensors of all ``files``; raises if none is quantised."""
    tensors = {key: tensor for file in files for key, tensor in load_tensors(file).items()}
    weights: Any  # without Float8Weight, as whole models of these are left to transformers
    if options["quant_method"] == MXFP4:
        plain, weights = expert_weights(tensors, dtype)
    else:
        plain, weights = dense_tensors(tensors, options, dtype)
    if not weights:
        raise ModelLoadError(
            f"the config.json asks for {options['quant_method']} weights, but the checkpoint has "
            "none; the files do not belong together"
        )
    return plain, weights


def restore_quantised(name: str, hf: Any, weights: Mapping[str, StoredWeight]) -> None:
    """Replace layers of a dequantised model by quantised ones; a log line counts the others."""
    left, modules = 0, dict(split_experts(hf).named_modules(remove_duplicate=False))
    for name_in_file, weight in weights.items():
        layer = name_in_file if name_in_file in modules else plain_name(name_in_file)
        module = modules.get(layer)
        if type(module) is not nn.Linear or not weight.has_supported_groups:
            left += 1
            continue
        hf.set_submodule(layer, weight.linear(layer, module.bias))
    if left:
        info(
            f"{name}: {left} of {len(weights)} quantised layers are dequantised, as their shapes "
            f"do not divide into groups of {ROW_GROUP}"
        )


def quantise_loaded(name: str, hf: Any, precision: str) -> Any:
    """Quantise a loaded module to "int8" or "int4", with the head in 8 bits; "none" dequantises it.
    Raises ConfigError if it is quantised already, or not on a CPU."""
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
        quantise_module(split_experts(hf), Scheme(precision, head="int8", finer=True))
    return hf


def dequantise(hf: Any) -> int:
    """Replace quantised layers by ordinary ones; returns how many there were."""
    layers = [(name, m) for name, m in hf.named_modules() if isinstance(m, QuantisedLinear)]
    for name, module in layers:
        hf.set_submodule(name, module.plain().to(hf.dtype))
    return len(layers)


def is_quantised(hf: nn.Module) -> bool:
    """Whether a model has layers that we keep quantised."""
    return any(isinstance(module, QuantisedLinear) for module in hf.modules())


# -- sizes of matrices -------------------------------------------------------------------------

# Bytes per weight, with its share of the scales: 4-bit weights have a scale and an offset per 32
# weights, 8-bit weights a scale per 64. The kernels store scales in half precision; the reference
# backend stores codes as bytes and scales in float32.
_KERNELS = {"int8": 1.0 + 2 / EIGHT_BIT_GROUP, "int4": 0.5 + 2 * 2 / ROW_GROUP}
_REFERENCE = {"int8": 1.0 + 4 / EIGHT_BIT_GROUP, "int4": 1.0 + 2 * 4 / ROW_GROUP}


def _linears(hf: nn.Module) -> Iterator[tuple[Any, MatrixSize]]:
    for module in hf.modules():
        if isinstance(module, LinearBase):
            yield module, module.matrix_size()
        elif isinstance(module, nn.Linear):
            numbers = module.weight.detach()
            elements, size = module.in_features * module.out_features, numbers.nbytes
            bits = 8 * size // max(1, elements)  # for a library's own quantised layer
            if is_plain(numbers) and numbers.is_floating_point():
                elements, bits = numbers.numel(), 8 * numbers.dtype.itemsize
            yield module, MatrixSize(bits, elements, size)


def matrix_sizes(hf: nn.Module) -> Iterator[MatrixSize]:
    """The sizes of all linear layers. Embeddings are left out: a step reads only a few rows."""
    return (size for _, size in _linears(hf))


def rounded_bytes(hf: Any, precision: str, width: int, readable: bool = False) -> int:
    """Bytes that a model's matrices take in ``precision``, with the head in 8 bits. Matrices that
    do not divide into groups take ``width`` bytes per weight. ``readable``: in the reference
    backend's layout instead of the kernels'."""
    widths = _REFERENCE if readable else _KERNELS
    head, total = hf.get_output_embeddings(), 0.0
    for module, size in _linears(hf):
        number = widths["int8" if module is head else precision]
        total += (width if module.in_features % ROW_GROUP else number) * size.elements
    return int(total)


def usual_bits(hf: nn.Module) -> int:
    """The bits that most weights of the matrices have; 0 without matrices."""
    counts = Counter[int]()
    for size in matrix_sizes(hf):
        counts[size.bits] += size.elements
    return max(counts, key=counts.__getitem__, default=0)

"""Quantised checkpoints in compressed-tensors' layout, which vLLM and transformers load.

Beside the plain tensors stand, for a linear layer ``L`` with weight ``[out, in]``:

===============  ======================================================================
int-quantized    ``L.weight`` int8 ``[out, in]``, ``L.weight_scale`` ``[out, 1]``
pack-quantized   ``L.weight_packed`` int32 ``[out, in / 8]``: element k in bits 4 (k % 8) of
                 word k // 8, plus 8; ``L.weight_scale`` ``[out, in / group]``;
                 ``L.weight_shape`` int64 ``[2]``; ``L.weight_zero_point`` packed along out
the same, of     ``L.weight_zero_point`` float32 ``[out, in / group]``, any number;
tensor groups    ``L.weight_global_scale`` 1
===============  ======================================================================

Of tensor groups the library unpacks no zero points and takes them in the number that is stored: so
offsets that are no multiple of the scale have a place. vLLM reads whole zero points only.

and config.json says under ``quantization_config`` which layers they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.model.quantised.convert import Scheme
from paceline.model.quantised.weights import QuantisedLinear, QuantisedWeight

METHOD = "compressed-tensors"
_FORMATS = {8: "int-quantized", 4: "pack-quantized"}
FROM_ZERO = 8  # between codes 0 to 15 and those that are stored
_PER_WORD = 8  # four-bit codes in an int32


def pack(codes: torch.Tensor) -> torch.Tensor:
    """int32 ``[rows, ceil(columns / 8)]`` of four-bit codes -8 to 7, the last word padded by 0."""
    rows, columns = codes.shape
    padded = nn.functional.pad(codes.long() + 8, (0, -columns % _PER_WORD))
    shifts = 4 * torch.arange(_PER_WORD)
    words = (padded.reshape(rows, -1, _PER_WORD) << shifts).sum(-1)
    packed: torch.Tensor = words.to(torch.uint32).view(torch.int32)
    return packed


def unpack(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Codes int8 ``[rows, columns]`` of int32 words, of ``bits`` each, the lowest bits first."""
    shifts = bits * torch.arange(32 // bits)
    codes = (words.long()[..., None] >> shifts) & (2**bits - 1)
    signed: torch.Tensor = codes.flatten(1) - 2 ** (bits - 1)
    return signed.to(torch.int8)


def tensors_of(hf: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a model with quantised layers, by the layout's names, others in ``dtype``."""
    quantised = {n: m for n, m in hf.named_modules() if isinstance(m, QuantisedLinear)}
    tensors = {name: t.to(dtype).contiguous() for name, t in hf.state_dict().items()}
    if hf.config.get_text_config(decoder=True).tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, module in quantised.items():
        weight = module.quantised
        stored = _scale_dtype(weight)
        tensors[f"{name}.weight_scale"] = weight.scales.to(stored).contiguous()
        if module.bias is not None:
            tensors[f"{name}.bias"] = module.bias.to(dtype).contiguous()
        if weight.bits == 8:
            tensors[f"{name}.weight"] = weight.codes.contiguous()
        else:
            codes = weight.codes - FROM_ZERO if weight.from_zero else weight.codes
            tensors[f"{name}.weight_packed"] = pack(codes).contiguous()
            if weight.from_zero and weight.offsets is not None:
                points = -weight.offsets.double() / weight.scales - FROM_ZERO
                tensors[f"{name}.weight_zero_point"] = points.float().contiguous()
                tensors[f"{name}.weight_global_scale"] = torch.ones(1)
            elif weight.offsets is not None:
                points = (-weight.offsets / weight.scales).round().to(torch.int8)
                tensors[f"{name}.weight_zero_point"] = pack(points.t()).t().contiguous()
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
    return tensors


def _scale_dtype(weight: QuantisedWeight) -> torch.dtype:
    """That loses nothing of what the grid's scales are rounded to (rounding.py)."""
    if not weight.from_zero:
        return torch.bfloat16
    return (
        torch.float16 if torch.equal(weight.scales.half().float(), weight.scales) else torch.float32
    )


def quantization_config(hf: Any, scheme: Scheme) -> dict[str, Any]:
    """What config.json says of the layers of ``hf``: those left as they are, by name."""
    groups = {"group_0": _group("Linear", scheme.precision, scheme)}
    head = hf.get_output_embeddings()
    if scheme.head not in (None, scheme.precision) and isinstance(head, QuantisedLinear):
        name = next(name for name, module in hf.named_modules() if module is head)
        groups["group_1"] = _group(name, scheme.head, scheme)  # a name goes before a class
    kinds = {group["format"] for group in groups.values()}
    return {
        "quant_method": METHOD,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": [name for name, module in hf.named_modules() if type(module) is nn.Linear],
        "config_groups": groups,
    }


def _group(target: str, precision: str | None, scheme: Scheme) -> dict[str, Any]:
    """Of the layers of one precision."""
    four = precision == "int4"
    free = four and scheme.zero == "free"
    weights = {
        "num_bits": 4 if four else 8,
        "type": "int",
        "symmetric": not four or scheme.zero == "none",
        "strategy": ("tensor_group" if free else "group") if four else "channel",
        "group_size": scheme.group if four else None,
        "dynamic": False,
        "observer": "minmax",
        **({"zp_dtype": "torch.float32"} if free else {}),
    }
    # Engines with products of 8 by 8 bits round activations per token, ours per group of it.
    activations = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    return {
        "targets": [target],
        "weights": weights,
        "input_activations": None if four else activations,
        "output_activations": None,
        "format": _FORMATS[4 if four else 8],
    }

"""Quantised checkpoints. GPTQ, AWQ and compressed-tensors are read into ``QuantisedWeight``, 8-bit
floats into ``Float8Weight``; compressed-tensors, which vLLM and transformers load, is also written.
Tensors of a layer ``L``:

===============  ======================================================================
compressed-tensors
int-quantized    ``L.weight`` int8 ``[out, in]``, ``L.weight_scale`` ``[out, 1]``
pack-quantized   ``L.weight_packed`` int32 ``[out, in / 8]``: code k, plus 8, from bit 4 (k % 8)
                 of word k // 8 on; ``L.weight_scale`` ``[out, in / group]``;
                 ``L.weight_shape`` int64 ``[2]``; ``L.weight_zero_point`` packed along out
pack-quantized,  ``L.weight_zero_point`` float32 ``[out, in / group]``, not only integers;
tensor_group     ``L.weight_global_scale`` 1
GPTQ             ``qweight`` int32 ``[in / 8, out]``, code k of a column in word k // 8;
                 ``scales`` ``[groups, out]``; ``qzeros`` int32 ``[groups, out / 8]``, one less
                 than the zero point (except in ``gptq_v2``); ``g_idx``: the group of each input
AWQ (gemm)       ``qweight`` int32 ``[in, out / 8]``, the outputs of a word in the order 0 2 4 6
                 1 3 5 7; ``scales`` ``[groups, out]``; ``qzeros`` packed like ``qweight``
fp8              ``L.weight`` float8_e4m3fn ``[out, in]``; ``L.weight_scale_inv``, by which it is
                 multiplied: one number, or one for each block of ``weight_block_size`` outputs
                 and inputs (DeepSeek: 128 and 128), of which the last may be smaller
float-quantized  ``L.weight`` as in fp8; ``L.weight_scale``: one number, or one for each output
(compressed-     ``[out, 1]``, group ``[out, groups]`` or block of ``block_structure``
tensors), fbgemm
===============  ======================================================================

With the strategy tensor_group zero points are unpacked floats, so an offset need not be a multiple
of the scale; vLLM reads integer zero points only. ``quantization_config`` in config.json says which
layers are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.model.quantised import mxfp4
from paceline.model.quantised.convert import Scheme
from paceline.model.quantised.weights import Float8Weight, QuantisedLinear, QuantisedWeight

METHOD = "compressed-tensors"
_FORMATS = {8: "int-quantized", 4: "pack-quantized"}
_UNSIGNED_SHIFT = 8  # from codes -8 to 7 to codes 0 to 15
_PER_WORD = 8  # 4-bit codes in an int32
Tensors = Mapping[str, torch.Tensor]
_FLOAT8 = ("fp8", "fbgemm_fp8")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where outputs 0 to 7 are in a word


# -- reading -----------------------------------------------------------------------------------


def quantised_weights(
    options: Mapping[str, Any], tensors: Tensors
) -> dict[str, QuantisedWeight | Float8Weight]:
    """The quantised weights in a checkpoint's ``tensors``, by layer. ``options``: its
    ``quantization_config``. Raises ModelLoadError for damaged tensors (naming one), and
    UnsupportedModelError for features of a format that are not implemented."""
    reader, endings = _READERS[options["quant_method"]]
    weights: dict[str, QuantisedWeight | Float8Weight] = {}
    for key in tensors:
        name, _, ending = key.rpartition(".")
        if ending not in endings:
            continue
        try:
            weights[name] = reader(name, tensors, options).check(f"{name}.weight")
        except KeyError as error:
            raise ModelLoadError(
                f"the checkpoint has {key} but no {error.args[0]}; copy its files again"
            ) from None
        except (RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ModelLoadError(
                f"the tensors of {name} do not fit together ({error}); copy the files again"
            ) from None
    return weights


_LAYOUTS = {None, "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"}
# Fields of a compressed-tensors config that change what the weights mean, and are not read here.
_CHANGING = ("transform_config", "sparsity_config")


def check_fields(name: str, options: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError for fields of a compressed-tensors config that transformers 5.23
    ignores, although they change what the weights mean."""
    for field in _CHANGING if options.get("quant_method") == METHOD else ():
        if not _is_neutral(options.get(field)):
            raise UnsupportedModelError(
                f"the quantization_config of {name} sets {field}, which is not read here and "
                "changes what the weights mean; take a checkpoint of the model without it"
            )


def _is_neutral(value: Any) -> bool:
    """Whether a field's value is empty, or says that sparse weights are stored densely."""
    if isinstance(value, Mapping):
        return value.get("format") == "dense" or not any(value.values())
    return not value


def is_supported(options: Mapping[str, Any], floats: bool = False) -> bool:
    """Whether a checkpoint with this ``quantization_config`` is read here, not by transformers.
    ``floats``: whether ``quantised_weights`` reads it: also 8-bit floats, of which whole models are
    left to transformers, but not MXFP4."""
    method = options.get("quant_method")
    if method in ("gptq", "awq", *(_FLOAT8 if floats else (mxfp4.METHOD,))):
        return True
    stated = options.get("config_groups") or {}
    groups = list(stated.values()) if isinstance(stated, Mapping) else [stated]
    if method != METHOD or not all(isinstance(group, Mapping) for group in groups):
        return False  # a list names the layers of a preset scheme of the compressed-tensors library
    layouts = _LAYOUTS | ({"float-quantized"} if floats else set())
    if not {options.get("format"), *(group.get("format") for group in groups)} <= layouts:
        return False
    kinds = [("int", 4), ("int", 8), *([("float", 8)] if floats else [])]
    return all(
        isinstance(item, Mapping)
        and (item.get("type", "int"), item.get("num_bits")) in kinds
        and item.get("strategy") in ("group", "channel", "tensor", "tensor_group", "block")
        and not item.get("actorder")
        for item in _of_groups(options)
    )


def _of_groups(options: Mapping[str, Any]) -> list[Any]:
    """How each group of layers stores its weights."""
    return [group.get("weights") or {} for group in (options.get("config_groups") or {}).values()]


def tensor_suffixes(options: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of a quantised layer's tensors end; its bias is not among them."""
    if options.get("quant_method") in _FLOAT8:
        return (".weight", ".weight_scale_inv", ".weight_scale")
    if options.get("quant_method") == METHOD:
        names = ("packed", "scale", "shape", "zero_point", "global_scale", "g_idx")
        return (".weight", *(f".weight_{name}" for name in names))
    return (".qweight", ".qzeros", ".scales", ".g_idx")


def _float8(name: str, tensors: Tensors, options: Mapping[str, Any]) -> Float8Weight:
    numbers = tensors[f"{name}.weight"]
    stored = tensors.get(f"{name}.weight_scale_inv")
    scales = (tensors[f"{name}.weight_scale"] if stored is None else stored).float()
    rows, columns = numbers.shape
    if scales.numel() == 1:
        return Float8Weight(numbers, scales.reshape(1, 1), (rows, columns))
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    if len(scales) == rows:
        return Float8Weight(numbers, scales, (1, -(-columns // scales.shape[1])))
    blocks = [options.get("weight_block_size")]
    if options["quant_method"] == METHOD:
        blocks = [item.get("block_structure") for item in _of_groups(options)]
    height, width = next((block for block in blocks if block), numbers.shape)
    return Float8Weight(numbers, scales, (height, width))


def _compressed(
    name: str, tensors: Tensors, options: Mapping[str, Any]
) -> QuantisedWeight | Float8Weight:
    plain, kinds = tensors.get(f"{name}.weight"), [g.get("type") for g in _of_groups(options)]
    if plain is not None and plain.dtype == torch.float8_e4m3fn and "float" in kinds:
        return _float8(name, tensors, options)
    scales = tensors[f"{name}.weight_scale"].float()
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    global_scale = tensors.get(f"{name}.weight_global_scale")
    scales = scales if global_scale is None else scales / global_scale.float()
    packed = tensors.get(f"{name}.weight_packed")
    zeros = tensors.get(f"{name}.weight_zero_point")
    if packed is None:
        codes, bits = tensors[f"{name}.weight"], 8
        if zeros is not None:
            zeros = zeros.reshape(scales.shape)
    else:
        rows, columns = (int(size) for size in tensors[f"{name}.weight_shape"])
        bits = _packed_bits(name, packed.shape[1], columns)
        codes = unpack(packed, bits)[:, :columns]
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpack(zeros.t(), bits)[:, :rows].t()
    if codes.dtype != torch.int8:
        raise ModelLoadError(
            f"{name}.weight is {codes.dtype}, where its config.json promises int8; "
            "the files do not belong together"
        )
    _check_order(name, tensors.get(f"{name}.weight_g_idx"), codes.shape[1], scales.shape[1])
    scales = scales.expand(len(codes), -1).contiguous()  # one scale per tensor applies to all rows
    if bits == 4 and zeros is not None and zeros.is_floating_point():
        offsets = -(zeros.double() + _UNSIGNED_SHIFT) * scales
        in_half = tensors[f"{name}.weight_scale"].dtype == torch.float16
        offsets = (offsets.half() if in_half else offsets).float()  # as when they were quantised
        return QuantisedWeight((codes + _UNSIGNED_SHIFT).contiguous(), scales, bits, offsets, True)
    return QuantisedWeight(codes.contiguous(), scales, bits, _offsets(zeros, scales))


def _packed_bits(name: str, words: int, columns: int) -> int:
    """Bits of a code, from the number of words in a row: a checkpoint may mix 4 and 8 bits."""
    bits = next((bits for bits in (4, 8) if -(-columns * bits // 32) == words), None)
    if bits is None:
        raise UnsupportedModelError(
            f"{name}.weight_packed has {words} words for {columns} numbers, which is neither 4 "
            "nor 8 bits; take a checkpoint of 4 or 8 bits"
        )
    return bits


def _by_columns(name: str, tensors: Tensors, options: Mapping[str, Any]) -> QuantisedWeight:
    """Reads GPTQ and AWQ, which store matrices ``[in, out]``."""
    bits, awq = options.get("bits", options.get("w_bit")), options["quant_method"] == "awq"
    version = str(options.get("version", "gemm")).lower() if awq else "gemm"
    if version != "gemm" or bits not in ((4,) if awq else (4, 8)):
        raise UnsupportedModelError(
            f"{options['quant_method']} weights of {bits} bits (version {version}) are not read "
            "here; take a checkpoint of GPTQ in 4 or 8 bits, or of AWQ in 4 bits (gemm)"
        )
    words, zeros = tensors[f"{name}.qweight"], unpack(tensors[f"{name}.qzeros"], bits)
    scales = tensors[f"{name}.scales"].float().t().contiguous()
    if awq:
        codes, zeros = _awq_outputs(unpack(words)), _awq_outputs(zeros)
    else:
        codes = unpack(words.t(), bits)
        _check_order(name, tensors.get(f"{name}.g_idx"), codes.shape[1], scales.shape[1])
        zeros = zeros.t() + (options.get("checkpoint_format") != "gptq_v2")
    return QuantisedWeight(codes.contiguous(), scales, bits, _offsets(zeros, scales))


def _awq_outputs(unpacked: torch.Tensor) -> torch.Tensor:
    """``[out, rows]`` in the order of the outputs, from ``[rows, out]`` in the order of AWQ."""
    return unpacked.reshape(len(unpacked), -1, 8)[..., list(_AWQ_ORDER)].flatten(1).t()


def _check_order(name: str, order: torch.Tensor | None, columns: int, groups: int) -> None:
    """Raises UnsupportedModelError if a group's inputs are not neighbours. ``order``: the group of
    each input; only -1 means that there is no order."""
    group, rest = divmod(columns, max(1, groups))
    if order is None or rest or bool((order < 0).all()):
        return
    if not torch.equal(order.long(), torch.arange(len(order)) // group):
        raise UnsupportedModelError(
            f"{name} has its inputs in an order of its own (GPTQ's desc_act or actorder), which is "
            "not read here; take a checkpoint made without it"
        )


def _offsets(zeros: torch.Tensor | None, scales: torch.Tensor) -> torch.Tensor | None:
    """The offsets for integer zero points ``[out, groups]``; None if all are 0."""
    if zeros is None or not zeros.any():
        return None
    zeros = zeros.float().contiguous()  # the kernels need contiguous offsets
    return -zeros * scales if zeros.shape == scales.shape else zeros


_Reader = Callable[[str, Tensors, Mapping[str, Any]], QuantisedWeight | Float8Weight]
# By quant_method, the reader and how the name of a tensor ends that every quantised layer has.
_READERS: dict[str, tuple[_Reader, set[str]]] = {
    METHOD: (_compressed, {"weight_scale"}),
    "gptq": (_by_columns, {"qweight"}),
    "awq": (_by_columns, {"qweight"}),
} | dict.fromkeys(_FLOAT8, (_float8, {"weight_scale", "weight_scale_inv"}))


# -- writing -----------------------------------------------------------------------------------


def tensors_of(hf: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a model, as compressed-tensors names them; unquantised ones in ``dtype``."""
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
            codes = weight.codes - _UNSIGNED_SHIFT if weight.unsigned else weight.codes
            tensors[f"{name}.weight_packed"] = pack(codes).contiguous()
            if weight.unsigned and weight.offsets is not None:
                points = -weight.offsets.double() / weight.scales - _UNSIGNED_SHIFT
                tensors[f"{name}.weight_zero_point"] = points.float().contiguous()
                tensors[f"{name}.weight_global_scale"] = torch.ones(1)
            elif weight.offsets is not None:
                points = (-weight.offsets / weight.scales).round().to(torch.int8)
                tensors[f"{name}.weight_zero_point"] = pack(points.t()).t().contiguous()
            tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
    return tensors


def _scale_dtype(weight: QuantisedWeight) -> torch.dtype:
    """The smallest dtype that stores the scales of rounding.py without loss."""
    if not weight.unsigned:
        return torch.bfloat16
    exact = torch.equal(weight.scales.half().float(), weight.scales)
    return torch.float16 if exact else torch.float32


def quantization_config(hf: Any, scheme: Scheme) -> dict[str, Any]:
    """The ``quantization_config`` of config.json for the layers of ``hf``."""
    groups = {"group_0": _group("Linear", scheme.precision, scheme)}
    head = hf.get_output_embeddings()
    if scheme.head not in (None, scheme.precision) and isinstance(head, QuantisedLinear):
        name = next(name for name, module in hf.named_modules() if module is head)
        groups["group_1"] = _group(name, scheme.head, scheme)  # a layer's name wins over its class
    kinds = {group["format"] for group in groups.values()}
    return {
        "quant_method": METHOD,
        "format": kinds.pop() if len(kinds) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "ignore": [name for name, module in hf.named_modules() if type(module) is nn.Linear],
        "config_groups": groups,
    }


def _group(target: str, precision: str | None, scheme: Scheme) -> dict[str, Any]:
    """An entry of ``config_groups``: how the layers that ``target`` names are quantised."""
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
    # Engines that multiply 8 by 8 bits round activations per token; ours does per group of inputs.
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


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes -8 to 7 into int32 ``[rows, ceil(columns / 8)]``, padded with code 0."""
    rows, columns = codes.shape
    padded = nn.functional.pad(codes.long() + 8, (0, -columns % _PER_WORD))
    shifts = 4 * torch.arange(_PER_WORD)
    words = (padded.reshape(rows, -1, _PER_WORD) << shifts).sum(-1)
    packed: torch.Tensor = words.to(torch.uint32).view(torch.int32)
    return packed


def unpack(words: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Unpack int32 words into int8 codes ``[rows, columns]`` of ``bits`` bits, low bits first."""
    shifts = bits * torch.arange(32 // bits)
    codes = (words.long()[..., None] >> shifts) & (2**bits - 1)
    signed: torch.Tensor = codes.flatten(1) - 2 ** (bits - 1)
    return signed.to(torch.int8)

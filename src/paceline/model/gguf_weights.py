"""Keep the weights of a GGUF file quantised, in a module that transformers has dequantised, without
rounding them again. A tensor replaces a layer's weight only if both have the same numbers, so this
file need not know how an architecture permutes rows.

=====  =====  ============================================================================
type   block  value of a weight (d, m, dmin: float16; sc, mn: integers)
=====  =====  ============================================================================
Q8_0      32  ``d * q``, q in 8 bits
Q4_0      32  ``d * (q - 8)``, q in 4 bits: inputs 0 to 15 in the low halves of bytes
Q4_1      32  ``d * q + m``
Q4_K     256  ``d * sc * q - dmin * mn``, sc and mn (6 bits) of each 32 inputs
Q6_K     256  ``d * sc * (q - 32)``, q in 6 bits, sc (8 bits) of each 16 inputs
=====  =====  ============================================================================

(From ggml-common.h and ggml-quants.c of llama.cpp; the ``gguf`` package dequantises alike.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.core.stages import info, stage
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.model.gguf import PLAIN, ROPE_FACTORS, GgufFile
from paceline.model.quantised.weights import QuantisedLinear, QuantisedWeight

_FREQUENCIES = ".attn_rot_embd.weight"  # RoPE frequencies, in each layer of old files
_HEAD, _EMBEDDING = "output", "token_embd"  # without "output" the head shares the embedding


def check_all_tensors_used(file: GgufFile, hf: Any) -> None:
    """Raises UnsupportedModelError, naming the tensor, if the file holds one that is no weight of
    ``hf``."""
    names = _tensor_names(file.architecture, hf)
    if names is None:
        return
    used = {
        f"{names.get_name(stem)}.{suffix}"
        for stem, _, suffix in (name.rpartition(".") for name in hf.state_dict())
    }
    unused = file.tensor_names - used - ROPE_FACTORS
    left = sorted(name for name in unused if not name.endswith(_FREQUENCIES))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UnsupportedModelError(
            f"{file.path} holds the tensor {left[0]}{more}, which no weight of the architecture "
            f"{file.architecture} takes here; take the model's own folder (safetensors) in place "
            "of its GGUF file"
        )


def _tensor_names(architecture: str, hf: Any) -> Any | None:
    """The gguf package's table from module names to tensor names; None if it has none."""
    import gguf

    number = next((n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    layers = hf.config.get_text_config(decoder=True).num_hidden_layers
    return None if number is None else gguf.get_tensor_name_map(number, layers)


def keep_blocks(path: Path, architecture: str, hf: Any) -> None:
    """Replace linear layers of ``hf`` by layers with the file's quantised blocks; a log line says
    which ones stay dequantised. Raises ModelLoadError, naming the tensor, for scales that are NaN
    or infinite."""
    from gguf import GGUFReader

    names = _tensor_names(architecture, hf)
    if names is None:
        info(f"{path.name} is dequantised: the layers of {architecture} are not known by name")
        return
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in GGUFReader(path).tensors}
    config, head = hf.config.get_text_config(decoder=True), hf.get_output_embeddings()
    layers = [(name, m) for name, m in hf.named_modules() if type(m) is nn.Linear]
    left: Counter[str] = Counter()
    with stage(f"keeping the blocks of {path.name}", total=len(layers), unit="layers") as progress:
        for name, module in layers:
            stored = names.get_name(name) or (_HEAD if module is head else "")
            tensor = tensors.get(stored) or (tensors.get(_EMBEDDING) if stored == _HEAD else None)
            kind = "" if tensor is None else str(tensor.tensor_type.name)
            weight = None
            if tensor is not None and kind in KINDS and module.in_features % 32 == 0:
                blocks = weight_of_blocks(tensor.name, kind, tensor.data)
                weight = _in_module_order(blocks, module, config)
            if weight is not None:
                hf.set_submodule(name, QuantisedLinear(weight, module.bias))
            elif kind not in PLAIN:
                left[kind or "no tensor of its own"] += 1
            progress.advance()
    if left:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in left.most_common())
        info(f"{path.name}: {sum(left.values())} of {len(layers)} layers are dequantised: {kinds}")


def _in_module_order(
    weight: QuantisedWeight, module: nn.Linear, config: Any
) -> QuantisedWeight | None:
    """The weight with its rows in the module's order; None if none gives the module's weight."""
    dense = module.weight.detach().float()
    for order in _row_orders(weight.shape[0], config):
        ordered = weight if order is None else weight.rows(order)
        if ordered.shape == dense.shape and _equal_in_bf16(ordered.dense(), dense):
            return ordered
    return None


def _equal_in_bf16(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two weights are equal, up to the rounding of one of them to bf16."""
    return float((a - b).norm()) <= 2**-7 * float(b.norm()) + 1e-12


def _row_orders(rows: int, config: Any) -> Iterator[torch.Tensor | None]:
    """Possible row orders. None: unchanged. Others take the two rows of each RoPE pair, which GGUF
    stores side by side, to the two halves of a head, as transformers has them."""
    yield None
    for heads in (config.num_attention_heads, getattr(config, "num_key_value_heads", None)):
        if heads and rows % (2 * heads) == 0:
            yield torch.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()


Array = np.ndarray[Any, Any]


def weight_of_blocks(name: str, kind: str, data: Array) -> QuantisedWeight:
    """Read the weight from ``data [out, bytes]``, a tensor of type ``kind``. Raises ModelLoadError,
    naming the tensor, for scales that are NaN or infinite."""
    read, size, inputs, bits, unsigned = KINDS[kind]
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    codes, scales, offsets = read(blocks)
    rows = len(data)
    shape = (rows, blocks.shape[0] // rows * inputs)
    weight = QuantisedWeight(
        torch.from_numpy(codes.reshape(shape)),
        torch.from_numpy(scales.reshape(rows, -1)),
        bits,
        None if offsets is None else torch.from_numpy(offsets.reshape(rows, -1)),
        unsigned,
    )
    for part in (weight.scales, weight.offsets):
        if part is not None and not bool(torch.isfinite(part).all()):
            row = int((~torch.isfinite(part)).nonzero()[0][0])
            raise ModelLoadError(
                f"a scale of {name} is no number (row {row}); download or copy the file again"
            )
    return weight


_Parts = tuple[Array, Array, Array | None]


def _half(blocks: Array, at: int) -> Array:
    """The float16 at byte ``at`` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(codes: Array) -> Array:
    """4-bit codes of bytes ``[blocks, parts, n]``: of each part the low halves, then the high."""
    return np.concatenate([codes & 15, codes >> 4], -1).reshape(len(codes), -1).view(np.int8)


def _q8_0(blocks: Array) -> _Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0), None


def _q4_0(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, None, 2:]) - np.int8(8), _half(blocks, 0), None


def _q4_1(blocks: Array) -> _Parts:
    return _nibbles(blocks[:, None, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Array) -> _Parts:
    packed = blocks[:, 4:16]
    low, high, more = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low & 63, (more & 15) | (low >> 2 & 48)], -1)
    least = np.concatenate([high & 63, (more >> 4) | (high >> 2 & 48)], -1)
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    offsets = -(_half(blocks, 2) * least.astype(np.float32))
    return codes, _half(blocks, 0) * scales.astype(np.float32), offsets


def _q6_k(blocks: Array) -> _Parts:
    lower, upper = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 32)
    low = np.concatenate([lower & 15, lower >> 4], -1)
    high = np.concatenate([upper >> shift & 3 for shift in (0, 2, 4, 6)], -1)
    codes = (low | high << 4).reshape(len(blocks), -1).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return codes, _half(blocks, 208) * scales, None


_Kind = tuple[Callable[[Array], _Parts], int, int, int, bool]
# By type: reader, bytes of a block, inputs of a block, bits of our codes, ``unsigned``.
KINDS: dict[str, _Kind] = {
    "Q8_0": (_q8_0, 34, 32, 8, False),
    "Q4_0": (_q4_0, 18, 32, 4, False),
    "Q4_1": (_q4_1, 20, 32, 4, True),
    "Q4_K": (_q4_k, 144, 256, 4, True),
    "Q6_K": (_q6_k, 210, 256, 8, False),
}

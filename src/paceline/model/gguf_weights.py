"""Weights of a GGUF file kept in its own blocks, in a module that transformers has dequantised.

What transformers knows of names and of the order of rows is not said again here: a tensor takes a
layer's place only where its numbers are the layer's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.stages import info, stage
from paceline.errors import UnsupportedModelError
from paceline.model.gguf import PLAIN, ROPE_FACTORS, GgufFile
from paceline.model.quantised.blocks import can_keep, weight_of_blocks
from paceline.model.quantised.weights import QuantisedLinear, QuantisedWeight

_FREQUENCIES = ".attn_rot_embd.weight"  # which old files repeat in each layer
_HEAD, _EMBEDDING = "output", "token_embd"  # a file without the one uses the other for both


def check_taken(file: GgufFile, hf: Any) -> None:
    """Raises UnsupportedModelError that names a tensor of the file which no weight of ``hf``
    takes: transformers passes over them."""
    import gguf

    number = next((n for n, a in gguf.MODEL_ARCH_NAMES.items() if a == file.architecture), None)
    if number is None:
        return  # transformers takes what it can by names of its own
    config = hf.config.get_text_config(decoder=True)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    taken = {
        f"{names.get_name(stem)}.{suffix}"
        for stem, _, suffix in (name.rpartition(".") for name in hf.state_dict())
    }
    unused = file.names - taken - ROPE_FACTORS
    left = sorted(name for name in unused if not name.endswith(_FREQUENCIES))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UnsupportedModelError(
            f"{file.path} holds the tensor {left[0]}{more}, which no weight of the architecture "
            f"{file.architecture} takes here; take the model's own folder (safetensors) in place "
            "of its GGUF file"
        )


def keep_blocks(path: Path, architecture: str, hf: Any) -> None:
    """Let the linear layers of ``hf`` multiply by the file's blocks; says what cannot.

    Raises ModelLoadError that names a tensor whose scales are no numbers.
    """
    import gguf

    tensors = {
        tensor.name.removesuffix(".weight"): tensor for tensor in gguf.GGUFReader(path).tensors
    }
    config = hf.config.get_text_config(decoder=True)
    known = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        info(f"{path.name} is dequantised: the layers of {architecture} are not known by name")
        return
    names = gguf.get_tensor_name_map(known[architecture], config.num_hidden_layers)
    layers = [(name, m) for name, m in hf.named_modules() if type(m) is nn.Linear]
    head = hf.get_output_embeddings()
    left: Counter[str] = Counter()
    with stage(f"keeping the blocks of {path.name}", total=len(layers), unit="layers") as progress:
        for name, module in layers:
            stored = names.get_name(name) or (_HEAD if module is head else "")
            tensor = tensors.get(stored) or (tensors.get(_EMBEDDING) if stored == _HEAD else None)
            kind = "" if tensor is None else str(tensor.tensor_type.name)
            weight = None
            if tensor is not None and can_keep(kind) and module.in_features % 32 == 0:
                weight = _as_laid_out(
                    weight_of_blocks(tensor.name, kind, tensor.data), module, config
                )
            if weight is not None:
                hf.set_submodule(name, QuantisedLinear(weight, module.bias))
            elif kind not in PLAIN:
                left[kind or "no tensor of its own"] += 1
            progress.advance()
    if left:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in left.most_common())
        info(f"{path.name}: {sum(left.values())} of {len(layers)} layers are dequantised: {kinds}")


def _as_laid_out(weight: QuantisedWeight, module: nn.Linear, config: Any) -> QuantisedWeight | None:
    """The weight with its rows in the module's order; None if no order gives its numbers."""
    wanted = module.weight.detach().float()
    for order in _orders(weight.shape[0], config):
        ordered = weight if order is None else weight.rows(order)
        if ordered.shape == wanted.shape and _same(ordered.dense(), wanted):
            return ordered
    return None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """But for what is lost where one of them was rounded to bf16."""
    return float((a - b).norm()) <= 2**-7 * float(b.norm()) + 1e-12


def _orders(rows: int, config: Any) -> Iterator[torch.Tensor | None]:
    """As they are, or rotated pairs apart in two halves of a head, as transformers has them."""
    yield None
    for heads in (config.num_attention_heads, getattr(config, "num_key_value_heads", None)):
        if heads and rows % (2 * heads) == 0:
            yield torch.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).flatten()

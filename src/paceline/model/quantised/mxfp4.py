"""GPT-OSS checkpoints, whose experts are in MXFP4: 4-bit floats with a power of two for each 32.

Of each layer, with E experts: ``gate_up_proj_blocks`` uint8 ``[E, 2 width, hidden / 32, 16]``, with
gates and ups in turn, and ``down_proj_blocks`` ``[E, hidden, width / 32, 16]``. A byte has two
codes, the first in its low bits. ``..._scales`` uint8 ``[E, rows, groups]`` are exponents plus 127.
(OCP Microscaling Formats Specification 1.0, section 5.3.)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.errors import ModelLoadError
from paceline.model.quantised.weights import QuantisedWeight

METHOD = "mxfp4"
# Codes 0 to 15 are these numbers divided by two.
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP = 32


def expert_weights(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, QuantisedWeight]]:
    """The other tensors of a checkpoint, and its experts' weights by the names of their layers.
    The stacked matrices of the experts, which transformers asks for, are among the former: zeros
    that take no memory. Raises ModelLoadError for damaged tensors, naming one."""
    plain = {k: tensor for k, tensor in tensors.items() if not k.endswith((_BLOCKS, _SCALES))}
    weights: dict[str, QuantisedWeight] = {}
    for key in tensors:
        if not key.endswith(_BLOCKS):
            continue
        name = key.removesuffix(_BLOCKS)
        experts, _, matrix = name.rpartition(".")
        codes, scales = _numbers(name, tensors)
        count, rows, inputs = codes.shape
        plain[name] = torch.zeros((), dtype=dtype).expand(count, inputs, rows)
        parts = {matrix: (codes, scales)}
        if matrix == "gate_up_proj":
            gates, ups = ((codes[:, n::2], scales[:, n::2]) for n in range(2))
            parts = {"gate_proj": gates, "up_proj": ups}
        for part, stacked in parts.items():
            numbers, factors = (tensor.contiguous() for tensor in stacked)
            for expert in range(count):
                layer = f"{experts}.{expert}.{part}"
                weight = QuantisedWeight(numbers[expert], factors[expert], 4, e2m1=True)
                weights[layer] = weight.check(f"{layer}.weight")
    if not weights:
        raise ModelLoadError(
            f"the config.json asks for {METHOD} weights, but the checkpoint has none; "
            "the files do not belong together"
        )
    return plain, weights


def _numbers(name: str, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[experts, rows, inputs]`` and scales ``[experts, rows, groups]`` of a matrix."""
    blocks, exponents = tensors[name + _BLOCKS], tensors.get(name + _SCALES)
    if exponents is None:
        raise ModelLoadError(
            f"the checkpoint has {name}{_BLOCKS} but no {name}{_SCALES}; copy its files again"
        )
    sizes = blocks.shape, exponents.shape
    fits = blocks.dim() == 4 and blocks.shape[3] == _GROUP // 2 and sizes[0][:3] == sizes[1]
    if not fits or {blocks.dtype, exponents.dtype} != {torch.uint8}:
        raise ModelLoadError(
            f"{name}{_BLOCKS} is {list(sizes[0])} and {name}{_SCALES} {list(sizes[1])}, which do "
            "not fit together; copy the files again"
        )
    pairs = torch.stack((blocks & 15, blocks >> 4), -1)
    scales = torch.where(exponents == 255, torch.nan, torch.exp2(exponents.float() - 128))
    return _DOUBLED[pairs.flatten(2).int()], scales

"""GPT-OSS checkpoints, whose experts are in MXFP4: 4-bit floats with a power of two for each 32.

Of each layer, with E experts: ``gate_up_proj_blocks`` uint8 ``[E, 2 width, hidden / 32, 16]``, with
gates and ups in turn, and ``down_proj_blocks`` ``[E, hidden, width / 32, 16]``. A byte has two
codes, the first in its low bits. ``..._scales`` uint8 ``[E, rows, groups]`` are exponents plus 127.
(OCP Microscaling Formats Specification 1.0, section 5.3.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from paceline.errors import ModelLoadError
from paceline.model.quantised.weights import (
    ROW_GROUP,
    LinearBase,
    MatrixSize,
    QuantisedLinear,
    QuantisedWeight,
)

METHOD = "mxfp4"
MXFP4_BYTES = 17 / 32  # of a number, with its share of a scale
# Codes 0 to 15 are these numbers divided by two.
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
# [256]: both numbers of a byte, the first in the lower byte of an int16.
_PAIRS = torch.stack((_DOUBLED.repeat(16), _DOUBLED.repeat_interleave(16)), 1)
_PAIRS = _PAIRS.view(torch.int16).squeeze(1)
_BLOCKS, _SCALES = "_blocks", "_scales"
_NO_NUMBER = 255


class Mxfp4Weight(NamedTuple):
    """A matrix as in the file: ``blocks [rows, groups, 16]``, ``exponents [rows, groups]``."""

    blocks: torch.Tensor
    exponents: torch.Tensor

    @property
    def has_supported_groups(self) -> bool:
        return True  # they are of 32 inputs

    def linear(self, layer: str, bias: torch.Tensor | None) -> QuantisedLinear:
        return Mxfp4Linear(self, bias)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), ROW_GROUP * self.exponents.shape[1]

    def decoded(self) -> QuantisedWeight:
        pairs = _PAIRS.index_select(0, self.blocks.flatten().int())
        codes = pairs.view(torch.int8).reshape(self.shape)
        scales = torch.exp2(self.exponents.float() - 128)  # of the doubled numbers
        return QuantisedWeight(codes, scales, 4, e2m1=True)


class Mxfp4Linear(QuantisedLinear):
    """A layer that decodes its weight at every access. The kernels read it once, from the mapped
    file, so that a model needs no memory beside theirs."""

    def __init__(self, weight: Mxfp4Weight, bias: torch.Tensor | None) -> None:
        LinearBase.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.stored, self.bias = weight, None if bias is None else bias.detach()

    @property
    def quantised(self) -> QuantisedWeight:
        return self.stored.decoded()

    @property
    def int16_activations(self) -> bool:
        return False

    def matrix_size(self) -> MatrixSize:
        blocks, exponents = self.stored
        return MatrixSize(4, 2 * blocks.numel(), blocks.numel() + exponents.numel())


def expert_weights(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Mxfp4Weight]]:
    """The other tensors of a checkpoint, and its experts' weights by the names of their layers.
    The stacked matrices of the experts, which transformers asks for, are among the former: zeros
    that take no memory. Raises ModelLoadError for damaged tensors, naming one."""
    plain = {k: tensor for k, tensor in tensors.items() if not k.endswith((_BLOCKS, _SCALES))}
    weights: dict[str, Mxfp4Weight] = {}
    for key in tensors:
        if not key.endswith(_BLOCKS):
            continue
        name = key.removesuffix(_BLOCKS)
        experts, _, matrix = name.rpartition(".")
        stacked = _stacked(name, tensors)
        count, rows, groups = stacked.exponents.shape
        plain[name] = torch.zeros((), dtype=dtype).expand(count, ROW_GROUP * groups, rows)
        parts = {matrix: slice(None)}
        if matrix == "gate_up_proj":
            parts = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
        for number in range(count):
            for part, outputs in parts.items():
                pair = (tensor[number, outputs] for tensor in stacked)
                weights[f"{experts}.{number}.{part}"] = Mxfp4Weight(*pair)
    return plain, weights


def _stacked(name: str, tensors: Mapping[str, torch.Tensor]) -> Mxfp4Weight:
    """The matrices of all experts, with a dimension for them in front."""
    blocks, exponents = tensors[name + _BLOCKS], tensors.get(name + _SCALES, torch.empty(0))
    shapes = blocks.shape, exponents.shape
    fits = exponents.dim() == 3 and shapes[0] == (*shapes[1], ROW_GROUP // 2)
    if not fits or {blocks.dtype, exponents.dtype} != {torch.uint8}:
        raise ModelLoadError(
            f"{name}{_BLOCKS} is {list(shapes[0])} and {name}{_SCALES} {list(shapes[1])}, which do "
            "not fit together; copy the files again"
        )
    if bool((exponents == _NO_NUMBER).any()):
        raise ModelLoadError(f"{name}{_SCALES} has a scale that is no number; copy the files again")
    return Mxfp4Weight(blocks, exponents)

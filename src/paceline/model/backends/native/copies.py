"""A native model's copy in 8 or 4 bits, rounded matrix by matrix as the kernels hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from paceline.core.stages import stage
from paceline.kernels.library import PLAIN
from paceline.model.backends.base import Adapted
from paceline.model.backends.native.packing import Packed, PackedLinear
from paceline.model.quantised.convert import Code, Scheme, children, copy_beside
from paceline.model.quantised.rounding import round_to_nearest
from paceline.model.quantised.weights import LinearBase, QuantisedLinear

# The linear layers of one packed matrix, in its order, with their parents and names.
_Members = list[tuple[PackedLinear, nn.Module, str]]


def rounded_copy(model: Adapted, precision: str) -> Any:
    """A native model's modules with other matrices; None if none divides into groups."""
    hf = copy_beside(model.hf, lambda m: m if isinstance(m, nn.Linear | LinearBase) else None)
    matrices = _matrices(hf, Scheme(precision, head="int8", finer=True))
    if not matrices:
        return None
    name = f"{model.name} in {precision}"
    with stage(f"quantising {name}", total=len(matrices), unit="matrices") as progress:
        for members, code in matrices:
            packed = _rounded(members, code, model.dtype)
            for layer, parent, key in members:
                setattr(parent, key, PackedLinear(layer, packed, layer.part, layer.first))
            progress.advance()
    return hf


def _matrices(hf: Any, scheme: Scheme) -> list[tuple[_Members, Code]]:
    head = hf.get_output_embeddings()
    by_matrix: dict[int, _Members] = {}
    for parent, key, child in children(hf):
        if isinstance(child, PackedLinear):
            by_matrix.setdefault(id(child.packed), []).append((child, parent, key))
    result = []
    for members in by_matrix.values():
        members.sort(key=lambda member: (member[0].part, member[0].first))
        layer = members[0][0]
        code = scheme.code_of(layer.in_features, layer is head)
        if code is not None:
            result.append((members, code))
    return result


def _rounded(members: _Members, code: Code, dtype: torch.dtype) -> Packed:
    linears = [
        QuantisedLinear(round_to_nearest(layer.weight, *code).of_layer(name), layer.bias)
        for layer, _, name in members
    ]
    return Packed.of(linears, dtype, gated=members[0][0].part != PLAIN)

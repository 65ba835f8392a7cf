"""A model's copy in 8 or 4 bits for the kernels: rounded matrix by matrix, or read as kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from paceline.core.stages import stage, warn
from paceline.kernels.library import PLAIN
from paceline.model.backends.base import Adapted
from paceline.model.backends.native.kept import key_of, read, write
from paceline.model.backends.native.packing import Form, Packed, PackedLinear
from paceline.model.backends.trial import relative_error
from paceline.model.quantised.convert import Code, Scheme, children, copy_beside
from paceline.model.quantised.rounding import round_to_nearest
from paceline.model.quantised.weights import HeldLinear, QuantisedLinear, quantised_product

_TRIED = 64  # outputs of a matrix that are compared with the readable truth


def rounded_copy(model: Adapted, precision: str) -> Any:
    """Modules that share all but their matrices with those of a model that the kernels run. None if
    they do not multiply by such matrices as they should, or no matrix divides into groups."""
    name = f"{model.name} in {precision}"
    hf = copy_beside(model.hf, lambda m: m if isinstance(m, nn.Linear | HeldLinear) else None)
    matrices = _matrices(hf, Scheme(precision, head="int8", finer=True))
    if not matrices:
        return None
    about = [
        (str(m.held.dtype), m.held.form and asdict(m.held.form), asdict(m.code), m.held.inputs)
        for m in matrices
    ]
    key = key_of(model.checkpoint, about)
    made = None if key is None else read(key, [matrix.blank for matrix in matrices])
    if made is None:
        with stage(f"quantising {name}", total=len(matrices), unit="matrices") as progress:
            made = []
            for matrix in matrices:
                made.append(matrix.rounded())
                progress.advance()
        if key is not None:
            write(key, made)
    forms: dict[tuple[Form | None, int], tuple[_Matrix, Packed]] = {}
    for matrix, packed in zip(matrices, made, strict=True):
        matrix.replace(packed)
        forms.setdefault((packed.form, packed.inputs), (matrix, packed))
    if not all(matrix.is_right(packed) for matrix, packed in forms.values()):
        warn(f"the kernels' products by {name} are wrong on this machine; they are left out")
        return None
    return hf


@dataclass(frozen=True)
class _Matrix:
    """Linear layers of one packed matrix, in its order, with their parents and names."""

    layers: tuple[PackedLinear, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    code: Code

    @property
    def held(self) -> Packed:
        return self.layers[0].packed

    def blank(self, form: Form | None) -> Packed:
        gated = self.layers[0].part != PLAIN
        return Packed.blank(self.layers, self.held.dtype, gated, form)

    def rounded(self) -> Packed:
        """One layer's numbers at a time are unpacked."""
        code = self.code
        linears = [
            QuantisedLinear(
                round_to_nearest(layer.weight, code.bits, code.group, code.zero), layer.bias
            )
            for layer in self.layers
        ]
        return Packed.of(linears, self.held.dtype, self.layers[0].part != PLAIN)

    def replace(self, packed: Packed) -> None:
        for layer, (parent, key) in zip(self.layers, self.owners, strict=True):
            setattr(parent, key, PackedLinear(layer, packed, layer.part, layer.first))

    def is_right(self, packed: Packed) -> bool:
        """Whether the kernels multiply by it as the readable truth does, tried on its first layer:
        logits of a whole model are no measure, as one code of an activation that is rounded
        otherwise changes all that follow (SmolLM2 in float32: by 4 %)."""
        layer = self.layers[0]
        if layer.part != PLAIN:  # of the same form as others
            return True
        x = torch.randn(2, packed.inputs, generator=torch.Generator().manual_seed(0))
        x = x.to(packed.dtype)
        rows = min(_TRIED, layer.out_features)
        wanted = quantised_product(x, packed.quantised(PLAIN, layer.first, rows))
        if packed.bias is not None:
            wanted += packed.bias[layer.first : layer.first + rows]
        product = packed.product(x)[:, layer.first : layer.first + rows]
        return relative_error(product, wanted) < (1e-5 if packed.dtype == torch.float32 else 1e-2)


def _matrices(hf: Any, scheme: Scheme) -> list[_Matrix]:
    """Those that are rounded, in an order that a model always has."""
    head = hf.get_output_embeddings()
    by_matrix: dict[int, list[tuple[PackedLinear, nn.Module, str]]] = {}
    for parent, key, child in children(hf):
        if isinstance(child, PackedLinear):
            by_matrix.setdefault(id(child.packed), []).append((child, parent, key))
    result = []
    for members in by_matrix.values():
        members.sort(key=lambda member: (member[0].part, member[0].first))
        layers, parents, names = zip(*members, strict=True)
        code = scheme.code_of(layers[0].in_features, layers[0] is head)
        if code is not None:
            result.append(_Matrix(layers, tuple(zip(parents, names, strict=True)), code))
    return result

"""A loaded model's own form in 8 or 4 bits, beside it: new are the rounded matrices alone.

    the model   embedding  norms  rotary tables | matrices as they were loaded
    its copy          (the very same)             | matrices in 8 or 4 bits

Layers keep their numbers and their shapes, so the copy reads keys and values that the model wrote,
in the model's own cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.kernels.library import PLAIN
from paceline.model.backends.native.model import NativeModel
from paceline.model.backends.native.packing import Form, Packed, PackedLinear
from paceline.model.backends.reference.norms import slow_norm
from paceline.model.backends.reference.products import MergedPart, PrepackedLinear, is_plain
from paceline.model.backends.reference.recognise import relative_error
from paceline.model.kept import key_of, read, write
from paceline.model.offload import brought, settle
from paceline.model.precision import is_quantised, quantise_loaded
from paceline.model.quantised.convert import Code, Scheme
from paceline.model.quantised.rounding import round_to_nearest
from paceline.model.quantised.weights import QuantisedLinear, plain_linear, quantised_product
from paceline.model.target import CausalModel
from paceline.stages import stage, warn

_TRIED = 64  # outputs of a matrix that are compared with the readable truth
_COPIES: WeakKeyDictionary[CausalModel, dict[str, CausalModel]] = WeakKeyDictionary()


class _Original(nn.Linear):
    """A linear layer of another model, whose weight is made when it is asked for: whatever the
    layout of a loaded model is, and wherever it stays, no second copy of it is held while it is
    rounded."""

    def __init__(self, source: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = source.in_features, source.out_features
        self._sources = (source,)  # in a tuple, so that it is no submodule

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        dense: torch.Tensor = self._own("weight")
        return dense.detach()

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        bias: torch.Tensor | None = self._own("bias")
        return None if bias is None else bias.detach()

    def _own(self, name: str) -> Any:
        source = self._sources[0]
        return brought(source, name) if isinstance(source, nn.Linear) else getattr(source, name)

    def plain(self) -> nn.Module:
        """The layer itself if it is a plain one, else one of the same numbers."""
        source: nn.Module = self._sources[0]
        if isinstance(source, nn.Linear) and not hasattr(source, "_hf_hook"):
            return source
        return plain_linear(self.weight, self.bias)


def quantised_copy(model: CausalModel, precision: str) -> CausalModel:
    """``model`` in "int8" or "int4", on the backend that was asked for with it.

    It stays with the model. Raises ConfigError where that cannot be: not on a CPU, or no matrix
    that divides into groups.
    """
    known = _COPIES.setdefault(model, {})
    if precision not in known:
        made = _packed(model, precision) if isinstance(model.native, NativeModel) else None
        known[precision] = made or _rounded(model, precision)
    return known[precision]


def forget_copy(model: CausalModel, precision: str) -> None:
    """Let go of the form made by ``quantised_copy``."""
    _COPIES.get(model, {}).pop(precision, None)


def _rounded(model: CausalModel, precision: str) -> CausalModel:
    """Of modules as the library has them."""
    name = f"{model.name} in {precision}"
    hf = quantise_loaded(name, _beside(model.hf, _Original), precision)
    if not is_quantised(hf):
        raise _without_groups(model, precision)
    for parent, key, child in _children(hf):
        if isinstance(child, _Original):  # left as it was, for its shape
            setattr(parent, key, child.plain())
    copied = CausalModel(hf, name)
    copied.asked = model.asked
    return copied.optimised()


def _without_groups(model: CausalModel, precision: str) -> ConfigError:
    return ConfigError(
        f"no matrix of {model.name} divides into groups of 32 inputs, so there is no "
        f"{precision} form of it; use another drafter"
    )


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
        gated = self.layers[0].place != PLAIN
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
        return Packed.of(linears, self.held.dtype, self.layers[0].place != PLAIN)

    def replace(self, packed: Packed) -> None:
        for layer, (parent, key) in zip(self.layers, self.owners, strict=True):
            setattr(parent, key, PackedLinear(layer, packed, layer.place, layer.first))

    def is_right(self, packed: Packed) -> bool:
        """Whether the kernels multiply by it as the readable truth does, tried on its first layer:
        logits of a whole model are no measure, as one code of an activation that is rounded
        otherwise changes all that follow (SmolLM2 in float32: by 4 %)."""
        layer = self.layers[0]
        if layer.place != PLAIN:  # of the same form as others
            return True
        x = torch.randn(2, packed.inputs, generator=torch.Generator().manual_seed(0))
        x = x.to(packed.dtype)
        rows = min(_TRIED, layer.out_features)
        wanted = quantised_product(x, packed.quantised(PLAIN, layer.first, rows))
        if packed.bias is not None:
            wanted += packed.bias[layer.first : layer.first + rows]
        found = packed.product(x)[:, layer.first : layer.first + rows]
        return relative_error(found, wanted) < (1e-5 if packed.dtype == torch.float32 else 1e-2)


def _packed(model: CausalModel, precision: str) -> CausalModel | None:
    """Of a model that the kernels run, matrix by matrix or as it was kept; None if they do not
    multiply by such matrices as they should."""
    assert isinstance(model.native, NativeModel)
    name = f"{model.name} in {precision}"
    hf = _beside(model.hf, lambda layer: layer)
    matrices = _matrices(hf, Scheme(precision, head="int8", finer=True))
    if not matrices:
        raise _without_groups(model, precision)
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
    copied = copy.copy(model)
    copied.hf, copied.name = hf, name
    named = {module: name for name, module in model.hf.named_modules()}
    copied._attention_modules = [hf.get_submodule(named[m]) for m in model._attention_modules]
    copied._hooked = set()
    copied.native = NativeModel(hf, model.native.decoder)
    return copied


def _matrices(hf: Any, scheme: Scheme) -> list[_Matrix]:
    """Those that are rounded, in an order that a model always has."""
    head = hf.get_output_embeddings()
    found: dict[int, list[tuple[PackedLinear, nn.Module, str]]] = {}
    for parent, key, child in _children(hf):
        if isinstance(child, PackedLinear):
            found.setdefault(id(child.packed), []).append((child, parent, key))
    result = []
    for members in found.values():
        members.sort(key=lambda member: (member[0].place, member[0].first))
        layers, parents, names = zip(*members, strict=True)
        code = scheme.code_of(layers[0].in_features, layers[0] is head)
        if code is not None:
            result.append(_Matrix(layers, tuple(zip(parents, names, strict=True)), code))
    return result


def _beside(module: Any, stand_in: Callable[[Any], nn.Module]) -> Any:
    """A copy with the very same parameters, with a ``stand_in`` for each linear layer. Those that
    are elsewhere come to the device."""
    if _is_linear(module):
        return stand_in(module)
    copied = copy.copy(module)
    # Tables of its own: parameters, hooks and children are looked up in them.
    vars(copied).update(
        {key: copy.copy(v) for key, v in vars(module).items() if isinstance(v, dict)}
    )
    copied._modules = {name: _beside(child, stand_in) for name, child in module._modules.items()}
    settle(copied)
    slow_norm(copied)
    return copied


def _is_linear(module: Any) -> bool:
    """A matrix of plain numbers in any layout, or one of our quantised ones."""
    if isinstance(module, (PackedLinear, PrepackedLinear, MergedPart, QuantisedLinear)):
        return True
    # Libraries' own layers are linear ones whose weight holds codes.
    return isinstance(module, nn.Linear) and is_plain(module.weight)


def _children(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(module.modules()):
        for key, child in list(parent.named_children()):
            yield parent, key, child

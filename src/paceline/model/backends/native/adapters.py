"""LoRA adapters in the kernels' layout, packed when they are first used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from paceline.core.adapter import Adapter, AdapterRun
from paceline.errors import ConfigError
from paceline.kernels.library import CAdapterRows, CLora
from paceline.model.backends.native.packing import GATED, PROJECTIONS, PackedMatrix
from paceline.model.backends.native.split import SplitLinear, owner
from paceline.model.quantised.weights import plain_linear

# The packed matrices of a layer, in the order of pl_adapter_rows: the module that has them, their
# projections, and whether they are gated.
_PACKED_MODULES = (
    ("self_attn", PROJECTIONS, False),
    ("self_attn", ("o_proj",), False),
    ("mlp", GATED, True),
    ("mlp", ("down_proj",), False),
)


class _Part(NamedTuple):
    """A packed projection. ``module``: the module that an adapter changes, ``rows``: which of that
    module's outputs are this projection's."""

    module: str
    rows: slice | torch.Tensor
    outputs: int


class NativeAdapters:
    """The adapters of one model."""

    def __init__(self, hf: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pairs: WeakKeyDictionary[Adapter, Any] = WeakKeyDictionary()
        self._matrices = [
            (_parts(getattr(layer, parent), f"model.layers.{n}.{parent}", names), gated)
            for n, layer in enumerate(hf.model.layers)
            for parent, names, gated in _PACKED_MODULES
        ] + [([_Part("lm_head", slice(None), hf.lm_head.out_features)], False)]

    def check(self, adapter: Adapter) -> None:
        """Pack an adapter. Raises ConfigError if the kernels cannot adapt one of its modules."""
        known = {part.module for parts, _ in self._matrices for part in parts}
        for name in adapter.pairs.keys() - known:
            raise ConfigError(
                f"the adapter {adapter.name} changes {name}, which the native kernels run without "
                "adapters; use --backend reference"
            )
        self.pairs_of(adapter)

    def pairs_of(self, adapter: Adapter) -> Any:
        """A C array with a CLora for each packed matrix; it lives as long as ``adapter``."""
        pairs = self._pairs.get(adapter)
        if pairs is None:
            made = [self._pair(adapter, parts, gated) for parts, gated in self._matrices]
            pairs = (CLora * len(made))(*(struct for struct, _ in made))
            pairs.packed = [packed for _, packed in made]
            self._pairs[adapter] = pairs
        return pairs

    def runs(self, runs: list[AdapterRun]) -> Any:
        """A C array of CAdapterRows."""
        return (CAdapterRows * len(runs))(
            *(
                CAdapterRows(
                    *(run.rows.start, run.rows.stop - run.rows.start),
                    *(run.logits.start, run.logits.stop - run.logits.start),
                    self.pairs_of(run.adapter),
                )
                for run in runs
            )
        )

    def _pair(self, adapter: Adapter, parts: list[_Part], gated: bool) -> tuple[Any, Any]:
        """The CLora for a packed matrix of ``parts``, and the matrices that it points to. The A of
        the parts are stacked; a part's B is padded with zeros for the A of the others."""
        pairs = [adapter.pairs.get(part.module) for part in parts]
        known = [pair[0] for pair in pairs if pair is not None]
        if not known:
            return CLora(), None
        stacked_a = torch.cat(known)
        padded_b, begin = [], 0
        for part, pair in zip(parts, pairs, strict=True):
            weight = torch.zeros(part.outputs, len(stacked_a), dtype=self._dtype)
            if pair is not None:
                end = begin + len(pair[0])
                weight[:, begin:end] = pair[1][part.rows]
                begin = end
            padded_b.append(plain_linear(weight))
        packed = (
            PackedMatrix.pack([plain_linear(stacked_a)], self._dtype),
            PackedMatrix.pack(padded_b, self._dtype, gated),
        )
        a, b = (matrix.struct() for matrix in packed)
        if gated:  # both sums are added, before the activation: each output counts
            b.outputs = 2 * -(-b.outputs // 16) * 16
        return CLora(a, b), packed


def _parts(module: Any, path: str, names: Sequence[str]) -> list[_Part]:
    """The projections ``names`` of an attention or MLP module; none of a mixture of experts."""
    parts = []
    for name in names:
        parent = owner(module, name)
        if hasattr(parent, name):
            outputs = getattr(parent, name).out_features
            if isinstance(parent, SplitLinear):
                key = next(key for key, child in module.named_children() if child is parent)
                parts.append(_Part(f"{path}.{key}", parent.rows[name], outputs))
            else:
                parts.append(_Part(f"{path}.{name}", slice(None), outputs))
    return parts

"""LoRA adapters in the kernels' layout, packed when they are first used."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from paceline.core.adapter import Adapter, AdapterRun
from paceline.errors import ConfigError
from paceline.kernels.library import CAdapterRows, CLora
from paceline.model.backends.native.packing import GATED, PROJECTIONS, PackedMatrix
from paceline.model.quantised.weights import plain_linear

# The packed matrices of a layer, in the order of pl_adapter_rows: modules, and whether it is gated.
_PACKED_MODULES = (
    (tuple(f"self_attn.{name}" for name in PROJECTIONS), False),
    (("self_attn.o_proj",), False),
    (tuple(f"mlp.{name}" for name in GATED), True),
    (("mlp.down_proj",), False),
)


class NativeAdapters:
    """The adapters of one model."""

    def __init__(self, hf: Any, dtype: torch.dtype) -> None:
        self._hf, self._dtype = hf, dtype
        self._pairs: WeakKeyDictionary[Adapter, Any] = WeakKeyDictionary()
        self._matrices = [
            (tuple(f"model.layers.{n}.{name}" for name in names), gated)
            for n in range(len(hf.model.layers))
            for names, gated in _PACKED_MODULES
        ] + [(("lm_head",), False)]

    def check(self, adapter: Adapter) -> None:
        """Pack an adapter. Raises ConfigError if the kernels cannot adapt one of its modules."""
        known = {name for names, _ in self._matrices for name in names}
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
            made = [self._pair(adapter, names, gated) for names, gated in self._matrices]
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

    def _pair(self, adapter: Adapter, names: tuple[str, ...], gated: bool) -> tuple[Any, Any]:
        """The CLora for the packed matrix of modules ``names``, and the matrices that it points to.
        The modules' A are stacked; a module's B is padded with zeros for the A of the others."""
        pairs = {name: adapter.pairs[name] for name in names if name in adapter.pairs}
        if not pairs:
            return CLora(), None
        stacked_a = torch.cat([a for a, _ in pairs.values()])
        padded_b, begin = [], 0
        for name in names:
            outputs = self._hf.get_submodule(name).out_features
            weight = torch.zeros(outputs, len(stacked_a), dtype=self._dtype)
            if name in pairs:
                end = begin + len(pairs[name][0])
                weight[:, begin:end] = pairs[name][1]
                begin = end
            padded_b.append(plain_linear(weight))
        packed = (
            PackedMatrix.pack([plain_linear(stacked_a)], self._dtype),
            PackedMatrix.pack(padded_b, self._dtype, gated),
        )
        a, b = (matrix.struct() for matrix in packed)
        if (
            gated
        ):  # count gate and up outputs separately: both sums are added, before the activation
            b.outputs = 2 * -(-b.outputs // 16) * 16
        return CLora(a, b), packed

"""Adapters in the kernels' layout, packed when they are first used."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from paceline.core.adapter import Adapter, AdapterRun
from paceline.errors import ConfigError
from paceline.kernels.library import CPair, CRun
from paceline.model.backends.native.packing import GATED, PROJECTIONS, Packed
from paceline.model.quantised.weights import plain_linear

_PAIRS = (  # of a layer, as in pl_run: modules of one packed matrix, and whether it is gated
    (tuple(f"self_attn.{name}" for name in PROJECTIONS), False),
    (("self_attn.o_proj",), False),
    (tuple(f"mlp.{name}" for name in GATED), True),
    (("mlp.down_proj",), False),
)


class NativeAdapters:
    """Those of one model."""

    def __init__(self, hf: Any, dtype: torch.dtype) -> None:
        self._hf, self._dtype = hf, dtype
        self._pairs: WeakKeyDictionary[Adapter, Any] = WeakKeyDictionary()
        self._matrices = [
            (tuple(f"model.layers.{n}.{name}" for name in names), gated)
            for n in range(len(hf.model.layers))
            for names, gated in _PAIRS
        ] + [(("lm_head",), False)]

    def check(self, adapter: Adapter) -> None:
        """Pack an adapter. Raises ConfigError for modules that the kernels do not know."""
        known = {name for names, _ in self._matrices for name in names}
        for name in adapter.pairs.keys() - known:
            raise ConfigError(
                f"the adapter {adapter.name} changes {name}, which the native kernels run without "
                "adapters; use --backend reference"
            )
        self.of(adapter)

    def of(self, adapter: Adapter) -> Any:
        """A C array of its pairs, which lives as long as it."""
        pairs = self._pairs.get(adapter)
        if pairs is None:
            made = [self._pair(adapter, names, gated) for names, gated in self._matrices]
            pairs = (CPair * len(made))(*(struct for struct, _ in made))
            pairs.packed = [packed for _, packed in made]
            self._pairs[adapter] = pairs
        return pairs

    def runs(self, runs: list[AdapterRun]) -> Any:
        return (CRun * len(runs))(
            *(
                CRun(
                    *(run.rows.start, run.rows.stop - run.rows.start),
                    *(run.logits.start, run.logits.stop - run.logits.start),
                    self.of(run.adapter),
                )
                for run in runs
            )
        )

    def _pair(self, adapter: Adapter, names: tuple[str, ...], gated: bool) -> tuple[Any, Any]:
        """What is added to a packed matrix of these modules: A below A, and each B beside zeros."""
        pairs = {name: adapter.pairs[name] for name in names if name in adapter.pairs}
        if not pairs:
            return CPair(), None
        low = torch.cat([a for a, _ in pairs.values()])
        high, begin = [], 0
        for name in names:
            outputs = self._hf.get_submodule(name).out_features
            weight = torch.zeros(outputs, len(low), dtype=self._dtype)
            if name in pairs:
                end = begin + len(pairs[name][0])
                weight[:, begin:end] = pairs[name][1]
                begin = end
            high.append(plain_linear(weight))
        packed = Packed.of([plain_linear(low)], self._dtype), Packed.of(high, self._dtype, gated)
        a, b = (matrix.struct() for matrix in packed)
        if gated:  # its sums are wanted, gates and others
            b.outputs = 2 * -(-b.outputs // 16) * 16
        return CPair(a, b), packed

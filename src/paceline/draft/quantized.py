"""The target drafts for itself in fewer bits: self-speculation by precision.

QuantSpec (Tiwari et al. 2025, arXiv 2502.10424), ML-SpecQD (Georganas et al. 2025, arXiv
2503.13565). Small batches are limited by reading weights, so a pass in 4 bits costs about a quarter
of one in 16 bits. Embeddings, norms and cache are the target's: there is no prompt to read, and
verification overwrites what the draft writes (selfspec.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.draft.selfspec import STOP_BELOW, STOP_BELOW_OFFLOADED, prepared_view
from paceline.draft.spec import Examined, Loading, Prepared, Target, TreeSpec
from paceline.errors import ConfigError
from paceline.model.copies import LayerView, quantised_copy
from paceline.model.precision import usual_bits
from paceline.model.quantised.weights import BITS


@dataclass(frozen=True)
class QuantizedDraft(TreeSpec):
    """The target's weights rounded to ``precision`` "int4" or "int8" when it is loaded."""

    kind = "quantized"
    page = "quantized.md"
    tried = "real"
    deepest = 16
    acceptance = (0.88, 0.9)  # of a model in 16 bits; of one trained or released in 4 bits: 0.98
    examples = ("quantized:int4", "quantized:int8,nodes=6,width=3")
    default_draft_length = 12  # chains end by themselves

    precision: str = "int4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision not in BITS:
            known = " or ".join(f"quantized:{name}" for name in reversed(BITS))
            raise ConfigError(f"draft 'quantized:{self.precision}': use {known}")

    def precisions(self) -> dict[str, QuantizedDraft]:
        return {"int8": replace(self, precision="int8")} if self.precision == "int4" else {}

    def prepare(self, loading: Loading) -> Prepared:
        target = loading.target
        if target.ranks is not None:
            raise ConfigError(
                f"draft '{self}' is made of all the target's weights, and these are not all here "
                f"({target.refused}); use another drafter"
            )
        bits = usual_bits(target.hf)
        if 0 < bits <= BITS[self.precision]:
            raise ConfigError(
                f"draft '{self}': most of {target.name} is held in {bits} bits already, so this "
                "draft would cost what the target costs; leave it out, or use another drafter"
            )
        copied = quantised_copy(target, self.precision)
        view = LayerView(copied, range(copied.num_layers))
        stop = STOP_BELOW if target.offload is None else STOP_BELOW_OFFLOADED
        return prepared_view(self, view, stop)

    def examine(self, target: Target, read: Any = None) -> Examined:
        text = f"drafts with the target itself in {self.precision}, in the target's cache"
        return replace(self.noted("draft-own-weights", text), target_in=self.precision)

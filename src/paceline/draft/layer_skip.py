"""Layer skipping: the target drafts without a fixed set of its layers.

Draft & Verify (Zhang et al. 2023, arXiv 2309.08168).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.draft.selfspec import OwnLayers
from paceline.draft.spec import Target, option

Layers = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerSkip(OwnLayers):
    """The target without the layers ``skip``, else without the share ``ratio``, evenly spread."""

    kind = "layer_skip"
    page = "layer_skip.md"
    tune_tries = "real"
    examples = ("layer_skip:skip=0", "layer_skip:nodes=9,ratio=0.3")

    skip: tuple[int, ...] | None = option(None, like="2x3x8 (layers of the target)")
    ratio: float = option(0.45, above=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.skip is not None and "ratio" in self.changed_options():
            raise self.refuse("skip fixes the set; leave out ratio")

    def kept(self, target: Target) -> Sequence[int]:
        skipped = self._skipped(target.num_layers)
        return [layer for layer in range(target.num_layers) if layer not in skipped]

    def _skipped(self, total: int) -> Layers:
        if self.skip is not None:
            if not set(self.skip) < set(range(total)):
                raise self.refuse(
                    f"skip names some of the target's layers 0 to {total - 1}, not all"
                )
            return self.skip
        candidates = skippable(total)
        if not candidates:
            raise self.refuse("the target has one layer, which it needs")
        return spread(candidates, min(len(candidates), max(1, round(self.ratio * total))))


def spread(candidates: Sequence[int], count: int) -> Layers:
    """``count`` of the candidates, evenly spread."""
    step = len(candidates) / count
    return tuple(candidates[int((i + 0.5) * step)] for i in range(count))


def skippable(num_layers: int) -> Layers:
    """Layers that may be skipped: not the first and the last, if there are others."""
    return tuple(range(1, num_layers - 1)) or tuple(range(1, num_layers))

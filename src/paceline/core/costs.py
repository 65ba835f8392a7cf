"""Cost curves: seconds of forwards on this machine, interpolated between measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


def _interpolate(points: Sequence[float], values: Sequence[float], point: float) -> float:
    """Linear interpolation; beyond the ends the outermost slope continues."""
    right = min(max(bisect_left(points, point), 1), len(points) - 1)
    x0, x1, y0, y1 = points[right - 1], points[right], values[right - 1], values[right]
    return y0 + (y1 - y0) * (point - x0) / (x1 - x0)


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward by number of tokens, linearly interpolated between measured points."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, count: float) -> float:
        """Seconds for ``count`` tokens; beyond the last point the last slope continues."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        return max(_interpolate(self.tokens, self.seconds, count), min(self.seconds))


@dataclass(frozen=True)
class TargetCosts:
    """Seconds of a target forward: one curve over tokens per sequence for each measured batch size.
    Sizes between one and the full batch are measured as well, because interpolating between the
    ends made a batch of 8 (of at most 32) look 14 % cheaper than it was."""

    batches: tuple[int, ...]
    curves: tuple[CostCurve, ...]

    def __call__(self, batch: float, tokens_each: float) -> float:
        """Seconds of a forward over ``tokens_each`` tokens of each of ``batch`` sequences."""
        if len(self.batches) == 1:
            return self.curves[0](tokens_each) * batch / self.batches[0]
        right = min(max(bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        ends = slice(right - 1, right + 1)
        values = [curve(tokens_each) for curve in self.curves[ends]]
        return max(_interpolate(self.batches[ends], values, batch), 1e-9)


@dataclass(frozen=True)
class DrafterCosts:
    """What the drafts of one drafter cost, by draft length. Entry 0 of a tuple is no draft.

    ``nodes``: most nodes of the tree. ``passes``: forwards of the drafter. ``seconds``: of one
    pass, by number of sequences. ``prior``: expected acceptance rate by level. The others are the
    drafter's ``DrafterTraits`` (draft/base.py)."""

    nodes: tuple[float, ...]
    passes: tuple[int, ...]
    seconds: CostCurve
    needs_prefill: bool = False
    sees_prompts: bool = False
    stops_early: bool = False
    shares_nodes: bool = False
    max_forced_tokens: int = 0
    prior: tuple[float, ...] = ()

    def for_batch(self, sequences: int) -> DrafterCosts:
        """The costs for each of ``sequences`` that decode in one step and share the nodes."""
        if not self.shares_nodes or sequences < 2:
            return self
        most = self.nodes[-1] // sequences
        nodes = tuple(min(count, max(n, most)) for n, count in enumerate(self.nodes))
        return replace(self, nodes=nodes)

    @property
    def max_length(self) -> int:
        """The greatest draft length."""
        return len(self.nodes) - 1

    @cached_property
    def model_free(self) -> bool:
        """Whether drafts need no forward, so that they can be made before deciding on one."""
        return not any(self.passes)

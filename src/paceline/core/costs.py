"""Costs of forwards on this machine, in seconds: curves through measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol


def _between(points: Sequence[float], values: Sequence[float], point: float) -> float:
    """Linear between points; beyond the ends the outermost slope continues."""
    right = min(max(bisect_left(points, point), 1), len(points) - 1)
    x0, x1, y0, y1 = points[right - 1], points[right], values[right - 1], values[right]
    return y0 + (y1 - y0) * (point - x0) / (x1 - x0)


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward by number of tokens, linear between measured points."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, count: float) -> float:
        """Seconds for ``count`` tokens; beyond the last point the last slope continues."""
        if len(self.tokens) == 1:
            return self.seconds[0]
        return max(_between(self.tokens, self.seconds, count), min(self.seconds))


@dataclass(frozen=True)
class TargetCosts:
    """Seconds of a target forward: for each number of sequences, by tokens per sequence. Numbers
    between one and a full batch are measured, too: by the ends alone eight of 32 looked 14 %
    cheaper than they were."""

    batches: tuple[int, ...]
    curves: tuple[CostCurve, ...]

    def __call__(self, batch: float, tokens_each: float) -> float:
        """A forward over ``tokens_each`` tokens of each of ``batch`` sequences."""
        if len(self.batches) == 1:
            return self.curves[0](tokens_each) * batch / self.batches[0]
        right = min(max(bisect_left(self.batches, batch), 1), len(self.batches) - 1)
        ends = slice(right - 1, right + 1)
        values = [curve(tokens_each) for curve in self.curves[ends]]
        return max(_between(self.batches[ends], values, batch), 1e-9)


class _Drafts(Protocol):
    """What is needed of a drafter (draft/base.py)."""

    def max_nodes(self, length: int) -> int: ...

    def passes(self, length: int) -> int: ...


# Of drafters that have them.
_FLAGS = ("reads", "follows", "ends_early", "shares", "takes_forced")


@dataclass(frozen=True)
class DrafterCosts:
    """Costs of one drafter's drafts by length; entry 0 is no draft.

    ``nodes``: most nodes. ``passes``: forwards of the drafter. ``seconds``: of one pass, by number
    of sequences. ``reads``: it first reads what it has not seen of a sequence; ``follows``: it has
    seen the prompt. ``ends_early``: it ends drafts itself where it is unsure. ``shares``: sequences
    that decode together share out the nodes. ``takes_forced``: so many tokens that a grammar forces
    become part of its drafts. ``prior``: acceptance by level."""

    nodes: tuple[float, ...]
    passes: tuple[int, ...]
    seconds: CostCurve
    reads: bool = False
    follows: bool = False
    ends_early: bool = False
    shares: bool = False
    takes_forced: int = 0
    prior: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        drafter: _Drafts,
        longest: int,
        seconds: CostCurve,
        costless: int = 2,
        prior: tuple[float, ...] = (),
    ) -> DrafterCosts:
        """For drafts of up to ``longest`` levels; ``costless`` times as many without passes."""
        lengths = range(1 + longest * (1 if drafter.passes(1) else costless))
        nodes = tuple(drafter.max_nodes(length) for length in lengths)
        passes = tuple(drafter.passes(length) for length in lengths)
        flags = {n: getattr(drafter, n, False) for n in _FLAGS}
        return cls(nodes, passes, seconds, prior=prior, **flags)

    def among(self, sequences: int) -> DrafterCosts:
        """For each of so many sequences that decode in one step."""
        if not self.shares or sequences < 2:
            return self
        most = self.nodes[-1] // sequences
        nodes = tuple(min(count, max(n, most)) for n, count in enumerate(self.nodes))
        return replace(self, nodes=nodes)

    @property
    def longest(self) -> int:
        return len(self.nodes) - 1

    @cached_property
    def costless(self) -> bool:
        """Whether proposing takes no forward, so drafts can be made before deciding."""
        return not any(self.passes)

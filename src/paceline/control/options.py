"""What a step may be spent on: drafts of a drafter, and what they bring along."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from paceline.core.costs import CostCurve
from paceline.draft.base import Drafter


@dataclass(frozen=True)
class DrafterCosts:
    """What drafts of one drafter bring along, by draft length; entry 0 is no draft.

    ``nodes``: most nodes. ``passes``: forwards of the drafter. ``seconds``: of one pass, by number
    of sequences. ``reads``: before it drafts it must read what it has not seen of a sequence; if it
    ``follows``, it has seen the prompt. One that ``ends_early`` ends a draft by itself where it is
    not sure. ``prior``: acceptance by level, before anything is seen.
    """

    nodes: tuple[float, ...]
    passes: tuple[int, ...]
    seconds: CostCurve
    reads: bool = False
    follows: bool = False
    ends_early: bool = False
    prior: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        drafter: Drafter,
        longest: int,
        seconds: CostCurve,
        costless: int = 2,
        prior: tuple[float, ...] = (),
    ) -> DrafterCosts:
        """Of drafts of up to ``longest`` levels; ``costless`` times as many where a level takes no
        pass."""
        lengths = range(1 + longest * (1 if drafter.passes(1) else costless))
        nodes = tuple(drafter.max_nodes(length) for length in lengths)
        passes = tuple(drafter.passes(length) for length in lengths)
        says = partial(getattr, drafter)
        flags = says("reads", False), says("follows", False), says("ends_early", False)
        return cls(nodes, passes, seconds, *flags, prior)

    @property
    def longest(self) -> int:
        return len(self.nodes) - 1

    @cached_property
    def costless(self) -> bool:
        """Whether proposing takes no forward, so that one may look before deciding."""
        return not any(self.passes)


class DraftOption(NamedTuple):
    """One way to spend a step on a sequence; ``length`` 0 is no draft.

    ``nodes`` to verify, expected tokens of the step (``gain``), ``seconds`` of its part of the step
    if all do alike, and of these what ``reading`` costs that must come first, written off over the
    tokens to come; ``first`` of it in this very step.
    """

    name: Hashable
    length: int
    nodes: float
    gain: float
    seconds: float
    reading: float = 0.0
    first: float = 0.0

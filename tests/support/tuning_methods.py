"""Made-up drafters and targets whose best settings can be worked out."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.engine.driver import StepSums
from paceline.lab.tune.search import MeasuredMethod

NOTHING = CostCurve((1,), (0.0,))
_MANY = 10**12


def chain(
    rate: float,
    pass_seconds: float,
    levels: int = 8,
    label: str = "draft",
    per_sequence: float = 0.0,
) -> MeasuredMethod:
    """A draft model whose every level is accepted with the same chance."""
    survival = tuple(rate**level for level in range(1, levels + 1))
    slope = pass_seconds + per_sequence * 63
    return MeasuredMethod(
        label,
        label,
        label,
        levels=levels_of(survival),
        costs=DrafterCosts(
            tuple(map(float, range(levels + 1))),
            tuple(range(levels + 1)),
            CostCurve((1, 64), (pass_seconds, slope)),
        ),
    )


def levels_of(survival: Sequence[float]) -> StepSums:
    """Steps in which level 1, 2, ... was accepted in this share of them."""
    accepted = tuple(round(_MANY * share) for share in survival)
    return StepSums(_MANY, _MANY, reached=(_MANY, *accepted[:-1]), accepted_at=accepted)


def step(
    draft: float = 0.0, target: float = 1.0, other: float = 0.0, batch: int = 1, nodes: int = 0
) -> StepSums:
    """One step of a batch, with ``nodes`` in all, and seconds by phase."""
    seconds = {"draft": draft, "target": target, "verify": 0.0, "other": other}
    return StepSums(1, batch, drafted=nodes, seconds=seconds)


PLAIN = MeasuredMethod("plain", "none", "none")


def target(free_tokens: int, seconds: float = 1.0, largest: int = 32) -> TargetCosts:
    """A forward costs the same up to so many tokens in all, and grows linearly from there."""
    batches = tuple(1 << n for n in range(largest.bit_length()))
    tokens = (1, 2, 4, 8, 16)

    def cost(total: int) -> float:
        return seconds * max(1.0, total / free_tokens)

    curves = [CostCurve(tokens, tuple(cost(b * n) for n in tokens)) for b in batches]
    return TargetCosts(batches, tuple(curves))

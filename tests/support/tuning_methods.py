"""Made-up drafters and targets whose best settings can be worked out."""

from __future__ import annotations

from paceline.core.costs import CostCurve, TargetCosts
from paceline.lab.tune.search import MeasuredMethod

NOTHING = CostCurve((1,), (0.0,))


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
        label=label,
        spec=label,
        family=label,
        shape="chain",
        survival=survival,
        acceptance=(rate,) * levels,
        reached=tuple(round(1000 * s / rate) for s in survival),
        nodes=tuple(map(float, range(levels + 1))),
        passes=tuple(range(levels + 1)),
        pass_seconds=CostCurve((1, 64), (pass_seconds, slope)),
    )


PLAIN = MeasuredMethod("plain", "none", "none", "")


def target(free_tokens: int, seconds: float = 1.0, largest: int = 32) -> TargetCosts:
    """A forward costs the same up to so many tokens in all, and grows linearly from there."""
    batches = tuple(1 << n for n in range(largest.bit_length()))
    tokens = (1, 2, 4, 8, 16)

    def cost(total: int) -> float:
        return seconds * max(1.0, total / free_tokens)

    curves = [CostCurve(tokens, tuple(cost(b * n) for n in tokens)) for b in batches]
    return TargetCosts(batches, tuple(curves))

"""What the forwards of a step take alone: for predicting steps from what was seen of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.control.cost import CostModel
from paceline.core.costs import CostCurve, DrafterCosts
from paceline.engine.engine import Engine
from paceline.model.measure import measure, measure_target

DRAFTER = "drafter"  # its name in the cost model
_ROUNDS = 10


def measure_alone(
    engine: Engine, nodes: float, plain_batch: int, batch: int, context: int = 64
) -> CostModel:
    """What a plain step's forward takes, one over ``nodes`` more, and a pass of the drafter. Of
    made-up sequences with ``context`` cached tokens, or as many as there is room for. The engine
    must be idle; it is as before afterwards."""
    drafter, low = engine.drafter, int(nodes)
    counts: dict[int, Sequence[int]] = {plain_batch: (1,)}
    counts[batch] = sorted({1, 1 + low, 2 + low})
    counts = dict(sorted(counts.items()))
    target = measure_target(engine.target, engine.cache, counts, drafter.features, context, _ROUNDS)
    seconds = CostCurve((batch,), (0.0,))
    if drafter.passes(1):
        seconds = measure(drafter.warm_up, (batch,), engine.target.device, _ROUNDS)
    return CostModel(target, {DRAFTER: DrafterCosts((0, nodes), (0, 1), seconds)})

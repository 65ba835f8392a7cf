"""What a cost model promises of draft lengths: for doctor, tune and bench."""

from __future__ import annotations

from collections.abc import Hashable

from paceline.control.cost import CostModel


def predicted_by_measured(predicted: float, measured: float) -> float:
    """How many times what was measured was predicted; 1.1 promises 10 % too much."""
    return predicted / measured if measured else 0.0


def token_rate(cost: CostModel, name: Hashable, length: int, batch: int = 1) -> float:
    """Tokens a second of ``batch`` sequences that all draft so many levels."""
    if not length:
        return batch / cost.rest(batch)
    return cost.tokens(name, length) / cost.table(name, batch)[length]


def speedup(cost: CostModel, name: Hashable, length: int, batch: int = 1) -> float:
    """Predicted tokens a second by plain decoding's."""
    return token_rate(cost, name, length, batch) * cost.rest(batch) / batch


def best_length(cost: CostModel, name: Hashable, batch: int = 1) -> int:
    """The draft length, 1 at least, with the most tokens a second."""
    lengths = range(1, cost.drafters[name].longest + 1)
    return max(lengths, key=lambda length: token_rate(cost, name, length, batch))

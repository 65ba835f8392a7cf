"""What a cost model promises of draft lengths: for doctor, tune and bench."""

from __future__ import annotations

from collections.abc import Hashable

from paceline.control.cost import CostModel


def predicted_by_measured(predicted: float, measured: float) -> float:
    """How many times what was measured was predicted; 1.1 promises 10 % too much."""
    return predicted / measured if measured else 0.0


def textbook_speedup(rate: float, length: float, cost: float) -> float:
    """(1 - a^(g+1)) / ((1 - a)(g c + 1)), Leviathan et al. 2023, theorem 3.8.

    One acceptance ``rate`` a for all positions, drafts of g tokens, and a drafter whose pass
    takes ``cost`` c of a target forward. Verifying g + 1 tokens is taken to cost what one does.
    """
    tokens = length + 1 if rate == 1 else (1 - rate ** (length + 1)) / (1 - rate)
    return tokens / (length * cost + 1)


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

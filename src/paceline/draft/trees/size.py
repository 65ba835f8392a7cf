"""How many nodes a dynamic tree is given where nobody says: as many as pay."""

from __future__ import annotations

from functools import lru_cache

from paceline.core.costs import CostCurve
from paceline.draft.trees.shape import best_shape, expected_tokens

TYPICAL = (0.6, 0.18, 0.08)  # how often the candidates of a node are right, by rank
FEWEST, MOST = 4, 32
_LEVELS = 8


def paying_nodes(price: CostCurve) -> int:
    """Nodes, ``FEWEST`` to ``MOST``, of the tree with the most tokens a second.

    ``price``: seconds of a target forward over so many tokens of one sequence, the tree's nodes and
    one more. Acceptance is taken to be ``TYPICAL``; that of a text moves the length, not this. What
    drafting costs is left out, as it follows from the levels and hardly from the nodes.
    """
    tokens = _expected()
    return max(range(FEWEST, MOST + 1), key=lambda nodes: tokens[nodes] / price(1 + nodes))


@lru_cache(maxsize=1)
def _expected() -> tuple[float, ...]:
    """Tokens of a step with the best tree of 0, 1, ... ``MOST`` nodes."""
    accuracy = [TYPICAL] * _LEVELS
    return tuple(expected_tokens(best_shape(accuracy, n), accuracy) for n in range(MOST + 1))

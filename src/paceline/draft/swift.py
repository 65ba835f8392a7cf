"""Which layers to skip: a search while text is generated.

SWIFT (Xia et al. 2024, arXiv 2410.06916). A set of layers is as good as the share of the last
tokens that the model predicts without them, in one parallel forward. The paper skips attention
and MLP separately and adds a Bayesian optimiser to its random search; here sets are of whole
layers, few enough that random sets and small changes of the best one do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

Layers = tuple[int, ...]


def spread(candidates: Sequence[int], count: int) -> Layers:
    """``count`` of the candidates, evenly spread: what a search starts from."""
    step = len(candidates) / count
    return tuple(candidates[int((i + 0.5) * step)] for i in range(count))


def skippable(num_layers: int) -> tuple[int, ...]:
    """Layers that a search may leave out: not the first and the last, if there are others."""
    return tuple(range(1, num_layers - 1)) or tuple(range(1, num_layers))


class SkipSearch:
    """Keeps the best set of skipped layers, proposes others, and hears how they did.

    All sets have ``count`` layers, so they cost the same and the better predictor is the better
    draft. Half of the challengers are random, half differ from the best in one layer. Ends after
    ``tries`` challengers, after ``patience`` in a row that lost, or when the best predicts
    ``enough`` of the tokens. Deterministic for the same scores.
    """

    def __init__(
        self,
        candidates: Sequence[int],
        count: int,
        tries: int = 64,
        patience: int = 32,
        enough: float = 0.95,
    ) -> None:
        assert 0 < count <= len(candidates)
        self.best = spread(candidates, count)
        self._candidates = tuple(candidates)
        self._tries = tries
        self._patience = patience
        self._enough = enough
        self._random = random.Random(0)
        self._seen = {self.best}
        self._lost = 0
        self.over = tries < 1

    def challenger(self) -> Layers | None:
        """A set not proposed before; None, and the search is over, if hardly any is left."""
        for _ in range(50):
            if self._random.random() < 0.5:
                found = self._random.sample(self._candidates, len(self.best))
            else:
                kept = [layer for layer in self._candidates if layer not in self.best]
                found = list(self.best)
                if kept:
                    found[self._random.randrange(len(found))] = self._random.choice(kept)
            layers = tuple(sorted(found))
            if layers not in self._seen:
                self._seen.add(layers)
                return layers
        self.over = True
        return None

    def hear(self, challenger: Layers, score: float, best_score: float) -> bool:
        """Scores of a challenger and of the best on the same tokens; whether it is the new best."""
        self._tries -= 1
        won = score > best_score
        self._lost = 0 if won else self._lost + 1
        if won:
            self.best = challenger
        self.over = self.over or (
            self._tries < 1
            or self._lost >= self._patience
            or max(score, best_score) >= self._enough
        )
        return won

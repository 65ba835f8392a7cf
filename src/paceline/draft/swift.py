"""Which layers to skip: a search while text is generated.

SWIFT (Xia et al. 2024, arXiv 2410.06916). A set of layers is as good as the share of generated
tokens that the model predicts without them, in one parallel forward. One window of text says
little, as some text is far easier than other: taking whatever set did better on it makes matters
worse (measured; see docs/drafters/layer_skip.md). So sets are compared on the same window only, and
all comparisons feed one linear model, in which skipping a layer costs what that layer is worth.
This takes the place of the paper's random search with a Bayesian optimiser on top.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Layers = tuple[int, ...]

# Standard deviations, as shares of a window: of a layer's worth, and of what one window shows
# (32 tokens: sqrt(0.2 / 32), and the windows' own taste).
_WORTH = 0.1
_NOISE = 0.15


def spread(candidates: Sequence[int], count: int) -> Layers:
    """``count`` of the candidates, evenly spread: what a search starts from."""
    step = len(candidates) / count
    return tuple(candidates[int((i + 0.5) * step)] for i in range(count))


def skippable(num_layers: int) -> Layers:
    """Layers that a search may leave out: not the first and the last, if there are others."""
    return tuple(range(1, num_layers - 1)) or tuple(range(1, num_layers))


class SkipSearch:
    """Proposes sets of skipped layers and hears how they did; ``best`` is the one to use.

    All sets have ``count`` layers, so they cost the same and the better predictor is the better
    draft. The worth of the layers has a normal posterior: challengers are the best sets for worths
    drawn from it (Thompson sampling), which tries what may be good and leaves what is surely bad.
    Ends after ``tries`` scores, when ``best`` predicts ``enough`` of four windows in a row, or
    when the posterior has nothing else to propose. Deterministic for the same scores.
    """

    def __init__(
        self, candidates: Sequence[int], count: int, tries: int = 160, enough: float = 0.95
    ) -> None:
        assert 0 < count <= len(candidates)
        self.best = spread(candidates, count)
        self.over = tries < 1
        self._candidates = tuple(candidates)
        self._tries = tries
        self._enough = enough
        self._high = 0  # windows in a row of which the best set predicted enough
        self._generator = torch.Generator().manual_seed(0)
        size = len(candidates)
        self._precision = torch.eye(size, dtype=torch.float64) / _WORTH**2
        self._evidence = torch.zeros(size, dtype=torch.float64)

    def sets(self, challengers: int = 3) -> list[Layers]:
        """Sets to be scored on one window: the best and some others; empty if it is over."""
        covariance, mean = self._posterior()
        root = torch.linalg.cholesky(covariance)
        tried = [self.best]
        for _ in range(8 * challengers):
            noise = torch.randn(len(mean), dtype=torch.float64, generator=self._generator)
            drawn = self._top(mean + root @ noise)
            if drawn not in tried:
                tried.append(drawn)
            if len(tried) > challengers:
                break
        self.over = self.over or len(tried) == 1
        return [] if self.over else tried

    def hear(self, scores: Sequence[tuple[Layers, float]]) -> None:
        """Shares of one window that sets predicted, the best set's first."""
        rows = torch.stack([self._row(layers) for layers, _ in scores])
        shares = torch.tensor([share for _, share in scores], dtype=torch.float64)
        # Differences within the window only: how easy its text is says nothing about layers.
        rows, shares = rows - rows.mean(0), shares - shares.mean()
        self._precision += rows.T @ rows / _NOISE**2
        self._evidence += rows.T @ shares / _NOISE**2
        self._high = self._high + 1 if scores[0][1] >= self._enough else 0
        self._tries -= len(scores)
        self.over = self._tries < 1 or self._high >= 4
        covariance, mean = self._posterior()
        promising = self._top(mean)
        gain = self._row(promising) - self._row(self.best)
        if float(gain @ mean) > float(gain @ covariance @ gain) ** 0.5:
            self.best = promising

    def _posterior(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Covariance ``[n, n]`` and mean ``[n]`` of what skipping each candidate gains."""
        covariance = torch.linalg.inv(self._precision)
        return covariance, covariance @ self._evidence

    def _top(self, worth: torch.Tensor) -> Layers:
        places = worth.topk(len(self.best)).indices.sort().values.tolist()
        return tuple(self._candidates[layer] for layer in places)

    def _row(self, layers: Layers) -> torch.Tensor:
        """float64 [n]: 1 where a candidate is skipped."""
        return torch.tensor([float(n in layers) for n in self._candidates], dtype=torch.float64)

"""How likely a drafted path is to be accepted, from the probability that its drafter gives it."""

from __future__ import annotations

import math
from collections.abc import Sequence

_PRIOR = 1.0, 2.0  # refusals and hazard before anything was seen
_KEPT, _LEAST = 0.98, 0.002  # of what was seen and of the prior, at each further draft


class Confidence:
    """A path of probability p is accepted with p ** k, and k is learnt.

    Every token adds its ``-log p`` to the path's hazard; k is refusals by hazard of what was tried,
    the most likely value where refusals are as frequent as the hazard says. (SmolLM2, its own 4-bit
    form, greedy: 0.1; the same with noise on its weights: 1.0.)
    """

    def __init__(self) -> None:
        self._refusals, self._hazard = _PRIOR

    @property
    def power(self) -> float:
        return self._refusals / self._hazard

    def least(self, chance: float) -> float:
        """The probability of a path that is accepted with ``chance``; 0 for 0."""
        return chance ** (1 / self.power) if chance > 0 else 0.0

    def learn(self, scores: Sequence[float], refused: bool) -> None:
        """Of a draft's tokens that were tried, of which the last may have been refused: the
        log-probability of the path up to each."""
        *_, before, last = 0.0, *scores
        # Where within the last token's hazard it was refused nobody knows: half of it, then.
        hazard = -(before + last) / 2 if refused else -last
        if math.isfinite(hazard):
            self._refusals = _KEPT * self._refusals + _LEAST * _PRIOR[0] + refused
            self._hazard = _KEPT * self._hazard + _LEAST * _PRIOR[1] + hazard

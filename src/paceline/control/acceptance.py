"""Acceptance rates of drafts: a prior that ships with each drafter, corrected by observed drafts.

Shrinkage has two levels. The engine's rates for a drafter start at the drafter's prior; a
sequence's rates start at the engine's, scaled by how often this sequence's drafts fail. Rates are
kept apart by *kind*: greedy or sampled text and, for lookups, the length of the match.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

from paceline.core.params import SamplingParams

UNKNOWN = (0.7, 0.75)  # prior of a drafter that ships none; optimistic, so that it gets tried
# Prior of a lookup, by match length and level. Measured on 55 greedy answers of SmolLM2-135M to
# prompts of eleven public sets (n-gram and suffix lookups, 4,900 drafts). At temperature 1 the
# acceptance of lookups and of the 4-bit draft was about the square of these rates.
MATCHED = {
    0: (0.35, 0.60, 0.70),
    1: (0.30, 0.54, 0.70),
    2: (0.50, 0.60, 0.70, 0.85),
    3: (0.63, 0.70, 0.85),
    4: (0.75, 0.85),
    5: (0.80, 0.82, 0.85),
    8: (0.85, 0.90, 0.93),
    16: (0.93, 0.93, 0.95),
    32: (0.95, 0.97),
}
_MATCHES = list(MATCHED)
_SAMPLED_FROM = 0.5  # temperature from which acceptance is that of sampled text
# An entry of ``MATCHED`` for drafts of lookups, and whether the text is sampled.
DraftKind = tuple[Hashable, bool]
GREEDY: DraftKind = (None, False)
CONTINUES: DraftKind = ("continues", False)  # how often a draft gets one level longer
_DECAY, _WEIGHT = 0.998, 4.0  # decay of old drafts; weight of the prior, in drafts
_PREVIOUS_LEVEL = 3.0  # times this weight, for the estimate taken from the level before
_SEQUENCE_DECAY, _SEQUENCE_WEIGHT = 0.97, 6.0  # the same for the drafts of one sequence
_NO_FAILURES = 0.0, 0.0


def kind_of(params: SamplingParams, match_length: int | None = None) -> DraftKind:
    """The kind of a request's drafts; ``match_length``: of a lookup's match."""
    match = None
    if match_length is not None:
        match = _MATCHES[bisect_right(_MATCHES, match_length) - 1]
    return match, params.temperature >= _SAMPLED_FROM


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected tokens of a step, entry n for draft length n: 1 + a_1 + a_1 a_2 + ...

    ``rates``: the chance that level i is accepted if all levels before it were (Leviathan et al.
    2023, equation 1, with one rate for each level).
    """
    expected, chance = [1.0], 1.0
    for rate in rates:
        chance *= rate
        expected.append(expected[-1] + chance)
    return expected


class AcceptanceEstimate:
    """Chance that level i of a draft is accepted if all levels before it were.

    Estimated from decayed counts and a prior, whose last rate holds for all deeper levels.
    """

    def __init__(self, prior: Sequence[float], depth: int) -> None:
        self._prior = (*prior, *[prior[-1]] * depth)[:depth]
        self.depth = depth
        self._reached = [0.0] * depth
        self._accepted = [0.0] * depth
        self._rates: list[float] = []  # cached, for as many levels as were asked for

    def record(self, reached: int, accepted: int) -> None:
        """Of ``reached`` levels that were tried, the first ``accepted`` were accepted."""
        self._rates = []
        for level in range(min(reached, self.depth)):
            self._reached[level] = _DECAY * self._reached[level] + 1.0
            self._accepted[level] = _DECAY * self._accepted[level] + (level < accepted)

    def rates(self, most: int | None = None) -> list[float]:
        """Acceptance rates of all levels, or of the first ``most``."""
        rates, most = self._rates, self.depth if most is None else min(most, self.depth)
        for level in range(len(rates), most):
            prior, prior_above = self._prior[level], self._prior[level - 1]
            # Few drafts reach a deep level, so it is expected to differ from its prior by the same
            # factor as the level before.
            factor = rates[-1] / prior_above if rates and prior_above else 1.0
            rate = min(prior * factor, 0.5 + 0.5 * prior)
            weight = _WEIGHT * (_PREVIOUS_LEVEL if rates else 1.0)
            rates.append((weight * rate + self._accepted[level]) / (weight + self._reached[level]))
        return rates[:most]


class AcceptanceTracker:
    """Acceptance estimates by drafter, kind of draft and sequence, for up to ``depth`` levels."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.priors: dict[Hashable, Sequence[float]] = {}
        self._all: dict[tuple[Hashable, DraftKind], AcceptanceEstimate] = {}
        # By sequence and drafter: failures, and how many the rates of all sequences expected. Their
        # ratio holds for all levels, so that a few drafts are enough to estimate it.
        self._failures: dict[int, dict[Hashable, tuple[float, float]]] = {}

    def of_all(self, name: Hashable, kind: DraftKind = GREEDY) -> AcceptanceEstimate:
        """The estimate over all sequences."""
        estimate = self._all.get((name, kind))
        if estimate is None:
            match, sampled = kind
            prior = MATCHED[match] if isinstance(match, int) else self.priors.get(name) or UNKNOWN
            if sampled:
                prior = [rate**2 for rate in prior]
            estimate = self._all[name, kind] = AcceptanceEstimate(prior, self.depth)
        return estimate

    def rates(
        self, seq_id: int, name: Hashable, kind: DraftKind = GREEDY, most: int | None = None
    ) -> list[float]:
        """Expected acceptance rates of a sequence's next draft, for its first ``most`` levels."""
        all_rates = self.of_all(name, kind).rates(most)
        failed, expected = self._failures.get(seq_id, {}).get(name, _NO_FAILURES)
        if not (expected and all_rates):
            return all_rates
        prior = _SEQUENCE_WEIGHT * max(1.0 - all_rates[0], 1e-3)
        factor = (failed + prior) / (expected + prior)
        return [max(0.0, 1.0 - factor * (1.0 - rate)) for rate in all_rates]

    def record(
        self, seq_id: int, name: Hashable, reached: int, accepted: int, kind: DraftKind = GREEDY
    ) -> None:
        """As ``AcceptanceEstimate.record``, for one sequence and for all of them."""
        estimate = self.of_all(name, kind)
        tried = estimate.rates(accepted + 1)[:reached]  # behind the first failure none was
        failures = self._failures.setdefault(seq_id, {})
        failed, expected = (_SEQUENCE_DECAY * n for n in failures.get(name, _NO_FAILURES))
        failed += accepted < min(reached, estimate.depth)
        failures[name] = failed, expected + len(tried) - sum(tried)
        estimate.record(reached, accepted)

    def forget(self, seq_id: int) -> None:
        self._failures.pop(seq_id, None)

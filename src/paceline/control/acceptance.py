"""How often drafts are right: a prior that ships with the drafter, corrected by what is seen.

Two levels of shrinkage: a sequence's drafts fail so many times as often as its engine's do, and the
engine's rates start at the prior. A *kind* tells drafts of one drafter apart that are not alike: of
a lookup by the length of its match. Those for sampled text are told apart, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams

UNKNOWN = (0.7, 0.75)  # prior of a drafter that brings none: hopeful, so that it is tried
# Prior of a lookup by the length of its match, level by level. Measured on 55 answers of
# SmolLM2-135M to prompts of eleven public sets (n-gram and suffix, 4,900 drafts). All are of greedy
# text. At temperature 1 lookups and the 4-bit form were right about the square as often there.
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
_KINDS = [max(least for least in MATCHED if least <= match) for match in range(max(MATCHED) + 1)]
_WARM = 0.5  # temperature from which a text is not like a greedy one
GOES_ON = "goes on"  # the kind of an estimate that says how often a draft has one level more
_DECAY, _WEIGHT = 0.998, 4.0  # of a draft seen before the last one; a prior's, in drafts
_ALIKE = 3.0  # times the weight of a prior: what a level is thought to be by the one before
_SEQUENCE_DECAY, _SEQUENCE_WEIGHT = 0.97, 6.0  # the same of one sequence's drafts


def is_sampled(params: SamplingParams) -> bool:
    """Whether drafts for such a request fail as those for sampled text do."""
    return params.temperature >= _WARM


def kind_of(confidence: int) -> int:
    """The entry of ``MATCHED`` for a match of such a length."""
    return _KINDS[min(max(confidence, 0), len(_KINDS) - 1)]


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected tokens of a step, entry g for draft length g: 1 + a_1 + a_1 a_2 + ...

    ``rates``: the chance that level i is accepted given that all before it were (Leviathan et al.
    2023, equation 1, with a rate for every level).
    """
    expected, chance = [1.0], 1.0
    for rate in rates:
        chance *= rate
        expected.append(expected[-1] + chance)
    return expected


def levels_tried(commit: Commit, length: int) -> int:
    """Levels that a draft of ``length`` levels was tried to.

    A path that ends in a leaf above the last level fails there as well: whatever the reason, the
    next level gained nothing. Only a request that ends stops the count.
    """
    if commit.finish_reason is not None:
        return commit.reached
    return min(len(commit.path) + 1, length)


class AcceptanceEstimate:
    """Chance that level i of a draft is accepted given that all before it were.

    From decayed counts and a prior, whose last rate holds for all levels beyond it.
    """

    def __init__(self, prior: Sequence[float], depth: int) -> None:
        self._prior = (*prior, *[prior[-1]] * depth)[:depth]
        self.depth = depth
        self._reached = [0.0] * depth
        self._accepted = [0.0] * depth
        self._rates: list[float] = []  # of the first levels, as far as they were asked for
        self._tokens: list[float] = []

    def record(self, reached: int, accepted: int, since: int = 0) -> None:
        """Of ``reached`` levels that were tried the first ``accepted`` were right.

        The first ``since`` of them are known already.
        """
        self._rates, self._tokens = [], []
        for level in range(since, min(reached, self.depth)):
            self._reached[level] = _DECAY * self._reached[level] + 1.0
            self._accepted[level] = _DECAY * self._accepted[level] + (level < accepted)

    def rates(self, most: int | None = None) -> list[float]:
        """Of all levels, or of the first ``most``."""
        rates, most = self._rates, self.depth if most is None else min(most, self.depth)
        for level in range(len(rates), most):
            prior, above = self._prior[level], self._prior[level - 1]
            # By how much the level before differs from its prior: one that few drafts reach is like
            # the last one, as far as that is known.
            before = rates[-1] / above if rates and above else 1.0
            rate = min(prior * before, 0.5 + 0.5 * prior)
            weight = _WEIGHT * (_ALIKE if rates else 1.0)
            rates.append((weight * rate + self._accepted[level]) / (weight + self._reached[level]))
        return rates[:most]

    def tokens(self) -> list[float]:
        """Expected tokens of a step, by draft length."""
        self._tokens = self._tokens or expected_tokens(self.rates())
        return self._tokens


class SequenceAcceptance:
    """One sequence's acceptance: it fails so many times as often as all sequences do. One number
    for all levels, so that few drafts tell it."""

    def __init__(self) -> None:
        self._failed = self._foreseen = 0.0  # failures, and what everyone's rates say of them

    def record(self, everyone: Sequence[float], reached: int, accepted: int, since: int) -> None:
        """As ``AcceptanceEstimate.record``, beside everyone's rates."""
        rates = everyone[since : min(reached, accepted + 1)]
        failed = accepted < min(reached, len(everyone))
        self._failed = _SEQUENCE_DECAY * self._failed + failed
        self._foreseen = _SEQUENCE_DECAY * self._foreseen + len(rates) - sum(rates)

    def rates(self, everyone: Sequence[float]) -> list[float]:
        """What is expected of this sequence where all have ``everyone``'s rates."""
        if not everyone:
            return []
        prior = _SEQUENCE_WEIGHT * max(1.0 - everyone[0], 1e-3)
        factor = (self._failed + prior) / (self._foreseen + prior)
        return [max(0.0, 1.0 - factor * (1.0 - rate)) for rate in everyone]


class AcceptanceTracker:
    """Estimates by drafter, kind of draft, and sequence, for up to ``depth`` levels."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.priors: dict[Hashable, Sequence[float]] = {}
        self._all: dict[tuple[Hashable, Hashable, bool], AcceptanceEstimate] = {}
        self._sequences: dict[int, dict[Hashable, SequenceAcceptance]] = {}

    def everyone(
        self, name: Hashable, kind: Hashable = None, sampled: bool = False
    ) -> AcceptanceEstimate:
        """Of all sequences."""
        estimate = self._all.get((name, kind, sampled))
        if estimate is None:
            prior = MATCHED[kind] if isinstance(kind, int) else self.priors.get(name) or UNKNOWN
            if sampled:
                prior = [rate**2 for rate in prior]
            estimate = self._all[name, kind, sampled] = AcceptanceEstimate(prior, self.depth)
        return estimate

    def rates(
        self,
        seq_id: int,
        name: Hashable,
        kind: Hashable = None,
        sampled: bool = False,
        most: int | None = None,
    ) -> list[float]:
        """What is expected of a sequence's next draft, level by level, of ``most`` levels."""
        everyone = self.everyone(name, kind, sampled).rates(most)
        sequence = self._sequences.get(seq_id, {}).get(name)
        return sequence.rates(everyone) if sequence else everyone

    def record(
        self,
        seq_id: int,
        name: Hashable,
        reached: int,
        accepted: int,
        since: int = 0,
        kind: Hashable = None,
        sampled: bool = False,
    ) -> None:
        """As ``AcceptanceEstimate.record``, for one sequence and for all."""
        everyone = self.everyone(name, kind, sampled)
        sequence = self._sequences.setdefault(seq_id, {}).setdefault(name, SequenceAcceptance())
        # Of levels behind the first that failed nothing is learnt.
        sequence.record(everyone.rates(accepted + 1), reached, accepted, since)
        everyone.record(reached, accepted, since)

    def forget(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)

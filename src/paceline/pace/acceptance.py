"""How often drafts are right, learnt from what the target made of earlier ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paceline.core.batch import Commit


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

    From decayed counts, together with a few observations' ``weight`` of a prior.
    """

    DOUBT = 3.0

    def __init__(self, prior: Sequence[float], decay: float, weight: float = 5.0) -> None:
        self._prior = tuple(prior)
        self._decay, self._weight = decay, weight
        self.depth = len(self._prior)
        self._reached = [0.0] * self.depth
        self._accepted = [0.0] * self.depth
        self._rates: list[float] | None = None
        self._cautious: list[float] | None = None
        self.age = 0  # changes whenever the rates do

    def record(self, reached: int, accepted: int, since: int = 0) -> None:
        """Of ``reached`` levels that were tried the first ``accepted`` were right.

        The first ``since`` of them are known already.
        """
        self.age += 1
        self._rates = self._cautious = None
        for level in range(since, min(reached, self.depth)):
            self._reached[level] = self._decay * self._reached[level] + 1.0
            self._accepted[level] = self._decay * self._accepted[level] + (level < accepted)

    def rates(self) -> list[float]:
        if self._rates is None:
            rates: list[float] = []
            for rate, tried, won in zip(self._prior, self._reached, self._accepted, strict=True):
                if rates:  # a level that few drafts reach is hardly better than the last
                    rate = (rate + rates[-1]) / 2
                rates.append((self._weight * rate + won) / (self._weight + tried))
            self._rates = rates
        return self._rates

    def cautious(self) -> list[float]:
        """Rates as if ``DOUBT`` drafts more had failed at every level: what is safe to say."""
        if self._cautious is None:
            counts = zip(self._reached, self._accepted, strict=True)
            self._cautious = [won / (self.DOUBT + tried) for tried, won in counts]
        return self._cautious

    def expected_tokens(self) -> list[float]:
        """Expected tokens of a step, entry g for draft length g."""
        return expected_tokens(self.rates())


class KnownAcceptance(AcceptanceEstimate):
    """Rates that were measured and stay."""

    def rates(self) -> list[float]:
        return list(self._prior)

    cautious = rates


class OwnAcceptance:
    """One sequence's acceptance: it fails so many times as often as all sequences do.

    One number for all levels, so that few drafts tell it. Simulated on the embedded pair's own
    acceptance (64 prompts, 128 tokens each, batch 1), lengths chosen by it are 1.02 times as fast
    as the best fixed one; with a rate for each level and sequence, 1.00 to 1.01 times.
    """

    DECAY = 0.97
    TRIALS = 12.0  # drafts that fail as often as everyone's do, to begin with
    LOST_TRIALS = 1.0  # the same, for one that has lost by drafting

    def __init__(self, everyone: AcceptanceEstimate) -> None:
        self._everyone = everyone
        self._failed = self._foreseen = 0.0  # failures, and what everyone's rates say of them
        self._known: dict[float, tuple[int, list[float]]] = {}  # tokens by trials, and their age

    def record(self, reached: int, accepted: int, since: int = 0) -> None:
        """As ``AcceptanceEstimate.record``."""
        rates = self._everyone.rates()[since : min(reached, accepted + 1)]
        failed = accepted < min(reached, self._everyone.depth)
        self._failed = self.DECAY * self._failed + failed
        self._foreseen = self.DECAY * self._foreseen + len(rates) - sum(rates)
        self._known.clear()

    def fade(self, share: float) -> None:
        """Trust what was seen less, as it is of long ago: keep so much of its weight."""
        self._failed *= share
        self._foreseen *= share
        self._known.clear()

    def rates(self, trials: float = TRIALS) -> list[float]:
        factor = self._factor(trials)
        return [max(0.0, 1.0 - factor * (1.0 - rate)) for rate in self._everyone.rates()]

    def _factor(self, trials: float) -> float:
        """How many times as often as everyone's drafts its own fail."""
        everyone = self._everyone.rates()
        prior = trials * max(1.0 - everyone[0], 1e-3) if everyone else 1.0
        return (self._failed + prior) / (self._foreseen + prior)

    def expected_tokens(self, lost: bool = False) -> list[float]:
        """Expected tokens of a step by draft length.

        Of a sequence that has ``lost`` by drafting rather by what it showed than by what everyone
        did.
        """
        trials = self.LOST_TRIALS if lost else self.TRIALS
        age, known = self._known.get(trials, (-1, []))
        if age != self._everyone.age:
            known = expected_tokens(self.rates(trials))
            self._known[trials] = (self._everyone.age, known)
        return known

    def cautious_tokens(self) -> list[float]:
        """Tokens of a step that may be counted upon, as ``expected_tokens``."""
        factor = self._factor(self.TRIALS)
        everyone = self._everyone.cautious()
        return expected_tokens([max(0.0, 1.0 - factor * (1.0 - rate)) for rate in everyone])


class AcceptanceTracker:
    """Estimates for each sequence and kind of draft, for up to ``depth`` levels.

    A kind is a drafter, or a drafter and how sure it was. A sequence starts from what all
    sequences showed for that kind.
    """

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._all: dict[Hashable, AcceptanceEstimate] = {}
        self._each: dict[int, dict[Hashable, OwnAcceptance]] = {}

    def of(self, seq_id: int, kind: Hashable) -> OwnAcceptance:
        own = self._each.setdefault(seq_id, {})
        if kind not in own:
            own[kind] = OwnAcceptance(self.everyone(kind))
        return own[kind]

    def everyone(self, kind: Hashable) -> AcceptanceEstimate:
        if kind not in self._all:
            # Hopeful, so that a drafter is tried; a few drafts in vain correct it.
            self._all[kind] = AcceptanceEstimate([0.7] * self.depth, decay=0.998)
        return self._all[kind]

    def know(self, kind: Hashable, rates: Sequence[float]) -> None:
        """Take these rates for those of a kind; nothing is accepted at levels beyond them."""
        missing = max(0, self.depth - len(rates))
        self._all[kind] = KnownAcceptance([*rates, *[0.0] * missing], decay=1.0)

    def record(
        self, seq_id: int, kind: Hashable, reached: int, accepted: int, since: int = 0
    ) -> None:
        """As ``AcceptanceEstimate.record``, for one sequence and for all."""
        self.of(seq_id, kind).record(reached, accepted, since)
        self.everyone(kind).record(reached, accepted, since)

    def forget(self, seq_id: int) -> None:
        self._each.pop(seq_id, None)

"""How often drafts are right, learnt from what the target made of earlier ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from paceline.core.batch import Commit

_KNOWN = 1e9  # drafts after which nothing is to be learnt any more


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

    def __init__(self, prior: Sequence[float], decay: float, weight: float = 5.0) -> None:
        self._prior = tuple(prior)
        self._decay, self._weight = decay, weight
        self.depth = len(self._prior)
        self._reached = [0.0] * self.depth
        self._accepted = [0.0] * self.depth
        self._rates: list[float] | None = None

    def record(self, reached: int, accepted: int, since: int = 0) -> None:
        """Of ``reached`` levels that were tried the first ``accepted`` were right.

        The first ``since`` of them are known already.
        """
        self._rates = None
        for level in range(since, min(reached, self.depth)):
            self._reached[level] = self._decay * self._reached[level] + 1.0
            self._accepted[level] = self._decay * self._accepted[level] + (level < accepted)

    def know(self, rates: Sequence[float]) -> None:
        """These are the rates; nothing is accepted at levels beyond them."""
        self._rates = None
        self._reached = [_KNOWN] * self.depth
        won = [_KNOWN * rate for rate in rates[: self.depth]]
        self._accepted = won + [0.0] * (self.depth - len(won))

    def rates(self) -> list[float]:
        if self._rates is None:
            rates: list[float] = []
            for rate, tried, won in zip(self._prior, self._reached, self._accepted, strict=True):
                if rates:  # a level that few drafts reach is hardly better than the last
                    rate = (rate + rates[-1]) / 2
                rates.append((self._weight * rate + won) / (self._weight + tried))
            self._rates = rates
        return self._rates


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

    def record(self, reached: int, accepted: int, since: int = 0) -> None:
        """As ``AcceptanceEstimate.record``."""
        rates = self._everyone.rates()[since : min(reached, accepted + 1)]
        failed = accepted < min(reached, self._everyone.depth)
        self._failed = self.DECAY * self._failed + failed
        self._foreseen = self.DECAY * self._foreseen + len(rates) - sum(rates)

    def rates(self, levels: int | None = None, lost: bool = False) -> list[float]:
        """Of the first levels, or all. What is expected of a sequence that has ``lost`` by drafting
        follows rather from what it showed than from what everyone did."""
        everyone = self._everyone.rates()
        trials = self.LOST_TRIALS if lost else self.TRIALS
        prior = trials * max(1.0 - everyone[0], 1e-3) if everyone else 1.0
        factor = (self._failed + prior) / (self._foreseen + prior)
        return [max(0.0, 1.0 - factor * (1.0 - rate)) for rate in everyone[:levels]]


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

    def record(
        self, seq_id: int, kind: Hashable, reached: int, accepted: int, since: int = 0
    ) -> None:
        """As ``AcceptanceEstimate.record``, for one sequence and for all."""
        self.of(seq_id, kind).record(reached, accepted, since)
        self.everyone(kind).record(reached, accepted, since)

    def forget(self, seq_id: int) -> None:
        self._each.pop(seq_id, None)

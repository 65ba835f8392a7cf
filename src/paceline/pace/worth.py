"""What a draft is worth: the tokens it is expected to add, for the seconds it takes.

Both are learnt where they are needed: acceptance from what the target made of earlier drafts, the
seconds from measurements at start-up and from steps since (steptime.py). The draft length of every
drafter and the choice between drafters follow from them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.core.batch import Commit
from paceline.core.costs import CostCurve
from paceline.draft.base import Drafter


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
        """Expected tokens of a step, entry g for draft length g: 1 + a_1 + a_1 a_2 + ..."""
        return expected_tokens(self.rates())


def expected_tokens(rates: Sequence[float]) -> list[float]:
    """Expected tokens of a step, entry g for draft length g, from each level's acceptance."""
    expected, chance = [1.0], 1.0
    for rate in rates:
        chance *= rate
        expected.append(expected[-1] + chance)
    return expected


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
        self._records = 0
        self._expected: tuple[int, int, list[float]] = (-1, -1, [])

    def record(self, reached: int, accepted: int, since: int = 0) -> None:
        """As ``AcceptanceEstimate.record``."""
        self._records += 1
        rates = self._everyone.rates()[since : min(reached, accepted + 1)]
        failed = accepted < min(reached, self._everyone.depth)
        self._failed = self.DECAY * self._failed + failed
        self._foreseen = self.DECAY * self._foreseen + len(rates) - sum(rates)

    def fade(self, share: float) -> None:
        """Trust what was seen less, as it is of long ago: keep so much of its weight."""
        self._records += 1
        self._failed *= share
        self._foreseen *= share

    def rates(self) -> list[float]:
        factor = self._factor()
        return [max(0.0, 1.0 - factor * (1.0 - rate)) for rate in self._everyone.rates()]

    def _factor(self, trials: float = TRIALS) -> float:
        """How many times as often as everyone's drafts its own fail."""
        everyone = self._everyone.rates()
        prior = trials * max(1.0 - everyone[0], 1e-3) if everyone else 1.0
        return (self._failed + prior) / (self._foreseen + prior)

    def own_tokens(self) -> list[float]:
        """As ``expected_tokens``, by what this sequence showed rather than what everyone did."""
        factor = self._factor(self.LOST_TRIALS)
        return expected_tokens([max(0.0, 1 - factor * (1 - r)) for r in self._everyone.rates()])

    def cautious_tokens(self) -> list[float]:
        """Tokens of a step that may be counted upon, as ``expected_tokens``."""
        factor = self._factor()
        everyone = self._everyone.cautious()
        return expected_tokens([max(0.0, 1.0 - factor * (1.0 - rate)) for rate in everyone])

    def expected_tokens(self) -> list[float]:
        """As ``AcceptanceEstimate.expected_tokens``."""
        known = (self._records, self._everyone.age)
        if self._expected[:2] != known:
            self._expected = (*known, expected_tokens(self.rates()))
        return self._expected[2]


class AcceptanceTracker:
    """Estimates for each sequence and kind of draft, for up to ``depth`` levels.

    A kind is a drafter, or a drafter and how sure it was. A sequence starts from what all
    sequences showed for that kind.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._all: dict[Hashable, AcceptanceEstimate] = {}
        self._each: dict[int, dict[Hashable, OwnAcceptance]] = {}

    def of(self, seq_id: int, kind: Hashable) -> OwnAcceptance:
        own = self._each.setdefault(seq_id, {})
        if kind not in own:
            own[kind] = OwnAcceptance(self._of_all(kind))
        return own[kind]

    def _of_all(self, kind: Hashable) -> AcceptanceEstimate:
        if kind not in self._all:
            # Hopeful, so that a drafter is tried; a few drafts in vain correct it.
            self._all[kind] = AcceptanceEstimate([0.7] * self._depth, decay=0.998)
        return self._all[kind]

    def record(
        self, seq_id: int, kind: Hashable, reached: int, accepted: int, since: int = 0
    ) -> None:
        """As ``AcceptanceEstimate.record``, for one sequence and for all."""
        self.of(seq_id, kind).record(reached, accepted, since)
        self._of_all(kind).record(reached, accepted, since)

    def forget(self, seq_id: int) -> None:
        self._each.pop(seq_id, None)


def levels_tried(commit: Commit, length: int) -> int:
    """Levels that a draft of ``length`` levels was tried to.

    A path that ends in a leaf above the last level fails there as well: whatever the reason, the
    next level gained nothing. Only a request that ends stops the count.
    """
    if commit.finish_reason is not None:
        return commit.reached
    return min(len(commit.path) + 1, length)


@dataclass(frozen=True)
class Profile:
    """What drafts of one drafter bring along, by draft length; entry 0 is no draft.

    ``nodes``: most nodes. ``passes``: forwards of the drafter. ``seconds``: of one pass, by number
    of sequences. ``reads``: before it drafts it must read what it has not seen of a sequence; if it
    ``follows``, it has seen the prompt.
    """

    nodes: tuple[int, ...]
    passes: tuple[int, ...]
    seconds: CostCurve
    reads: bool = False
    follows: bool = False

    @classmethod
    def of(cls, drafter: Drafter, longest: int, seconds: CostCurve) -> Profile:
        """Of drafts of up to ``longest`` levels; twice as many where a level takes no pass."""
        longest *= 1 if drafter.passes(1) else 2
        lengths = range(longest + 1)
        nodes = tuple(drafter.max_nodes(length) for length in lengths)
        passes = tuple(drafter.passes(length) for length in lengths)
        reads, follows = getattr(drafter, "reads", False), getattr(drafter, "follows", False)
        return cls(nodes, passes, seconds, reads, follows)

    @property
    def longest(self) -> int:
        return len(self.nodes) - 1

    @cached_property
    def costless(self) -> bool:
        """Whether proposing takes no forward, so that one may look before deciding."""
        return not any(self.passes)

    @cached_property
    def row_seconds(self) -> float:
        """Seconds by which a pass grows for each further row, as when a prompt is read."""
        return max(0.0, self.seconds(1024) - self.seconds(1)) / 1023

    def drafting(self, length: int, batch: int) -> float:
        """Seconds in which ``batch`` sequences are drafted for."""
        return self.passes[length] * self.seconds(batch) if batch else 0.0


def dearest(profiles: Sequence[Profile]) -> Profile:
    """A profile that costs at each length what the dearest of several does."""
    longest = max(own.longest for own in profiles)

    def at(values: tuple[int, ...], length: int) -> int:
        return values[min(length, len(values) - 1)]

    lengths = range(longest + 1)
    nodes = tuple(max(at(own.nodes, n) for own in profiles) for n in lengths)
    dear = max(profiles, key=lambda own: own.passes[-1] * own.seconds(1))
    passes = tuple(at(dear.passes, n) for n in lengths)
    return Profile(nodes, passes, dear.seconds, any(own.reads for own in profiles))


def best(gains: Sequence[Sequence[float]], seconds: Sequence[Sequence[float]]) -> list[int]:
    """The option of each sequence with which the batch gains most tokens a second.

    ``gains[i][k]`` are the expected tokens, ``seconds[i][k]`` the part of the step of option k of
    sequence i. A ratio of sums is maximised by Dinkelbach's iteration (1967): at the rate reached
    so far, every option must be worth its time.
    """
    chosen = [
        max(range(len(own)), key=lambda k: own[k] / times[k])
        for own, times in zip(gains, seconds, strict=True)
    ]
    for _ in range(4 if len(chosen) > 1 else 0):
        tokens = sum(own[k] for own, k in zip(gains, chosen, strict=True))
        rate = tokens / sum(times[k] for times, k in zip(seconds, chosen, strict=True))
        before = chosen
        chosen = [
            max(range(len(own)), key=lambda k: own[k] - rate * times[k])
            for own, times in zip(gains, seconds, strict=True)
        ]
        if chosen == before:
            break
    return chosen


@dataclass
class RetryBackoff:
    """When a drafter that is not used tries again: ever more seldom while it is in vain."""

    wait: float = 16.0
    idle: float = 0.0

    def used(self) -> None:
        """It drafted because that was best."""
        self.wait, self.idle = 16.0, 0.0

    def due(self, step: float = 1.0) -> bool:
        """It does not draft; ``step`` is what this step counts. Whether to try all the same."""
        self.idle += step
        return self.idle >= self.wait

    def tried(self, most: float) -> None:
        """It did. The next wait is twice as long, up to ``most`` steps."""
        self.wait, self.idle = min(2 * self.wait, most), 0.0

"""How long to draft: fixed, or the length that maximises expected tokens per measured second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.batch import Commit
from paceline.core.sequence import Sequence as Request
from paceline.engine.costs import StepCosts


class Controller(Protocol):
    def lengths(self, seqs: Sequence[Request]) -> list[int]:
        """Draft length (tree levels) wished for each sequence; 0 is plain decoding."""
        ...

    def observe(self, commits: Sequence[Commit], seconds: float) -> None:
        """See a step's outcome and its wall time."""
        ...

    def forget(self, seq_id: int) -> None: ...


class FixedLength:
    """The same draft length for all sequences, always."""

    def __init__(self, length: int) -> None:
        self._length = length

    def lengths(self, seqs: Sequence[Request]) -> list[int]:
        return [self._length] * len(seqs)

    def observe(self, commits: Sequence[Commit], seconds: float) -> None:
        pass

    def forget(self, seq_id: int) -> None:
        pass


@dataclass
class AcceptanceEstimate:
    """Chance that position i is accepted given that all before it were, from decayed counts.

    Starts from ``prior`` (what other sequences showed) with the weight of a few observations.
    """

    prior: Sequence[float]
    decay: float
    weight: float = 3.0
    reached: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached = [0.0] * len(self.prior)
        self.accepted = [0.0] * len(self.prior)

    def record(self, reached: int, accepted: int) -> None:
        for position in range(min(reached, len(self.prior))):
            self.reached[position] = self.decay * self.reached[position] + 1.0
            self.accepted[position] = self.decay * self.accepted[position] + (position < accepted)

    def rates(self) -> list[float]:
        return [
            (self.weight * prior + accepted) / (self.weight + reached)
            for prior, reached, accepted in zip(
                self.prior, self.reached, self.accepted, strict=True
            )
        ]

    def expected_tokens(self) -> list[float]:
        """Expected tokens of a step, entry g for draft length g: 1 + a_1 + a_1 a_2 + ..."""
        expected, chance = [1.0], 1.0
        for rate in self.rates():
            chance *= rate
            expected.append(expected[-1] + chance)
        return expected


@dataclass
class _Probe:
    """When a sequence that does not draft tries again: ever more seldom while it is in vain."""

    wait: int = 16
    idle: int = 0


class AdaptiveLength:
    """Per sequence, from observed acceptance and the costs measured at start-up.

    Maximises (expected tokens of the batch) / (draft levels + target step + overhead). The length
    depends on the past only, never on the tokens being drafted, so it cannot bias the output.
    """

    MAX_WAIT = 512  # steps between probes: a probe of one level costs well under one per cent

    def __init__(
        self,
        costs: StepCosts,
        max_length: int,
        max_nodes: Callable[[int], int],
        passes: Callable[[int], int] = lambda length: length,
    ) -> None:
        self._costs = costs
        self._max_length = max_length
        self._nodes = [max_nodes(length) for length in range(max_length + 1)]
        self._passes = [passes(length) for length in range(max_length + 1)]
        self._overhead = 0.1 * costs.target(1, 1)  # time outside the forwards, corrected as we go
        self._expected_seconds = 0.0
        self._all = AcceptanceEstimate([0.7] * max_length, decay=0.99, weight=5.0)
        self._each: dict[int, AcceptanceEstimate] = {}
        self._probes: dict[int, _Probe] = {}

    def lengths(self, seqs: Sequence[Request]) -> list[int]:
        if not seqs:
            return []
        prefilling = any(seq.num_pending > 1 for seq in seqs)
        gains = [self._estimate(seq.seq_id).expected_tokens() for seq in seqs]
        lengths = self._best(gains)
        lengths = [self._probe(seq, length) for seq, length in zip(seqs, lengths, strict=True)]
        # A step that prefills is no measure of the overhead.
        self._expected_seconds = 0.0 if prefilling else self._seconds(lengths)
        return lengths

    def _estimate(self, seq_id: int) -> AcceptanceEstimate:
        if seq_id not in self._each:
            self._each[seq_id] = AcceptanceEstimate(self._all.rates(), decay=0.95)
        return self._each[seq_id]

    def _seconds(self, lengths: Sequence[int]) -> float:
        """Predicted time of a step without the overhead."""
        tokens = sum(1 + self._nodes[length] for length in lengths)
        seconds = self._costs.target(len(lengths), tokens / len(lengths))
        passes = [self._passes[length] for length in lengths]
        for number in range(max(passes)):
            seconds += self._costs.draft(sum(own > number for own in passes))
        return seconds

    def _rate(self, gains: Sequence[Sequence[float]], lengths: Sequence[int]) -> float:
        tokens = sum(gain[length] for gain, length in zip(gains, lengths, strict=True))
        return tokens / (self._seconds(lengths) + self._overhead)

    def _best(self, gains: Sequence[Sequence[float]]) -> list[int]:
        batch = len(gains)
        best = max(
            ([length] * batch for length in range(self._max_length + 1)),
            key=lambda lengths: self._rate(gains, lengths),
        )
        if batch == 1:
            return best
        # Then each sequence on its own: a level must earn its share of the step at the best rate.
        rate = self._rate(gains, best)
        top = max(best)
        pass_cost = self._costs.draft(batch) / batch
        deepest = self._nodes[-1]
        extra = self._costs.target(batch, 1 + deepest) - self._costs.target(batch, 1)
        token_cost = extra / (batch * max(1, deepest))
        own = [
            max(
                range(top + 1),
                key=lambda g: (
                    gain[g] - rate * (self._passes[g] * pass_cost + self._nodes[g] * token_cost)
                ),
            )
            for gain in gains
        ]
        return own if self._rate(gains, own) > rate else best

    def _probe(self, seq: Request, length: int) -> int:
        probe = self._probes.setdefault(seq.seq_id, _Probe())
        if length > 0:
            probe.idle = 0
            probe.wait = 16
            return length
        probe.idle += 1
        if probe.idle < probe.wait:
            return 0
        probe.idle = 0
        probe.wait = min(2 * probe.wait, self.MAX_WAIT)
        return 1

    def observe(self, commits: Sequence[Commit], seconds: float) -> None:
        for commit in commits:
            if commit.reached:
                self._all.record(commit.reached, len(commit.path))
                self._estimate(commit.seq_id).record(commit.reached, len(commit.path))
        if self._expected_seconds:
            # Bounded, so that one hiccup of the machine does not change the policy.
            surplus = min(max(0.0, seconds - self._expected_seconds), self._expected_seconds)
            self._overhead += 0.05 * (surplus - self._overhead)

    def forget(self, seq_id: int) -> None:
        self._each.pop(seq_id, None)
        self._probes.pop(seq_id, None)

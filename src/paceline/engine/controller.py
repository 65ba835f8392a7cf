"""How long to draft: fixed, or the length that maximises expected tokens per measured second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from paceline.core.batch import Commit
from paceline.core.sequence import Sequence as Request
from paceline.draft.worth import Acceptance, Probe, Profile, StepTime, best, levels_tried


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


class _Fill:
    """Nodes that a drafter proposes, as a share of the most it might: n-grams are often short."""

    def __init__(self) -> None:
        self.share = 1.0

    def record(self, nodes: int, most: int) -> None:
        self.share += 0.05 * (min(1.0, nodes / most) - self.share)


class AdaptiveLength:
    """Per sequence and drafter, from observed acceptance and the costs measured at start-up.

    Maximises (expected tokens of the batch) / (drafting + target step + overhead). The length
    depends on the past only, never on the tokens being drafted, so it cannot bias the output.

    ``profiles`` by the names that requests use; those that name none have the ``default``.
    Drafters in ``bounds`` decide for themselves and get their longest length.
    """

    # Steps between probes. A probe costs a pass of the drafter or, where that is free, only a few
    # nodes; and what is looked up may turn good at any time.
    MAX_WAIT = 512.0
    MAX_WAIT_FREE = 32.0

    def __init__(
        self,
        steps: StepTime,
        profiles: Mapping[str, Profile],
        bounds: Mapping[str, int] | None = None,
        default: str = "",
    ) -> None:
        self._steps = steps
        self._profiles = dict(profiles)
        self._bounds = dict(bounds or {})
        self._default = default or next(iter(profiles))
        depth = max((profile.longest for profile in self._profiles.values()), default=0)
        self._acceptance = Acceptance(depth)
        self._fill = {name: _Fill() for name in self._profiles}
        self._probes: dict[int, Probe] = {}
        self._wished: dict[int, tuple[str, int]] = {}

    def lengths(self, seqs: Sequence[Request]) -> list[int]:
        names = [seq.params.drafter or self._default for seq in seqs]
        wishes = [self._bounds.get(name, 0) for name in names]
        own = [place for place, name in enumerate(names) if name in self._profiles]
        tables = {name: self._seconds(name, len(seqs)) for name in {names[place] for place in own}}
        gains = [self._gains(seqs[place].seq_id, names[place]) for place in own]
        chosen = self._settle(len(seqs), [names[place] for place in own], tables, gains)
        for place, length, gain in zip(own, chosen, gains, strict=True):
            seq, name = seqs[place], names[place]
            wishes[place] = self._probe(seq, name, length, gain, tables[name])
            self._wished[seq.seq_id] = (name, min(wishes[place], seq.room - 1))
        for name in tables:
            lengths = [wishes[place] for place in own if names[place] == name]
            if any(lengths):
                self._steps.begin(name, self._drafting(name, lengths))
        return wishes

    def _gains(self, seq_id: int, name: str) -> list[float]:
        return self._acceptance.of(seq_id, name).expected_tokens()

    def _seconds(self, name: str, batch: int) -> list[float]:
        """A sequence's part of the step, by draft length."""
        profile, fill = self._profiles[name], self._fill[name].share
        return [
            self._steps.step(batch, nodes * fill, profile.drafting(length, batch), name) / batch
            for length, nodes in enumerate(profile.nodes)
        ]

    def _settle(
        self,
        batch: int,
        names: Sequence[str],
        tables: Mapping[str, Sequence[float]],
        gains: Sequence[Sequence[float]],
    ) -> list[int]:
        # A drafter's own table may be shorter than the deepest one's.
        options = [gain[: len(tables[name])] for gain, name in zip(gains, names, strict=True)]
        chosen = best(options, [tables[name] for name in names])
        if batch == 1 or not any(chosen):
            return chosen
        # A pass costs nearly as much for one sequence as for all: it must pay for those that draft.
        tokens = sum(gain[length] for gain, length in zip(gains, chosen, strict=True))
        plain = self._steps.step(batch, 0.0, 0.0)
        seconds = plain
        for name in set(names):
            lengths = [n for own, n in zip(names, chosen, strict=True) if own == name]
            nodes = sum(self._profiles[name].nodes[length] for length in lengths) / batch
            drafting = self._drafting(name, lengths)
            seconds += self._steps.step(batch, nodes, drafting, name) - plain
        return chosen if tokens / seconds > len(chosen) / plain else [0] * len(chosen)

    def _drafting(self, name: str, lengths: Sequence[int]) -> float:
        """Seconds of a drafter's passes: each over the sequences that are not done yet."""
        profile = self._profiles[name]
        passes = [profile.passes[length] for length in lengths]
        return sum(
            profile.seconds(sum(count > number for count in passes))
            for number in range(max(passes))
        )

    def _probe(
        self,
        seq: Request,
        name: str,
        length: int,
        gains: Sequence[float],
        seconds: Sequence[float],
    ) -> int:
        probe = self._probes.setdefault(seq.seq_id, Probe())
        if length > 0:
            probe.used()
            return length
        if not probe.due():
            return 0
        return max(range(1, len(seconds)), key=lambda g: gains[g] / seconds[g])

    def observe(self, commits: Sequence[Commit], seconds: float) -> None:
        decoding = 0
        for commit in commits:
            decoding += bool(commit.tokens)
            name, length = self._wished.pop(commit.seq_id, ("", 0))
            if not commit.drafted or not length:
                continue  # no proposal: nothing was tried, and nothing was paid
            profile = self._profiles[name]
            self._fill[name].record(commit.drafted, profile.nodes[length])
            reached = levels_tried(commit, length)
            self._acceptance.record(commit.seq_id, name, reached, len(commit.path))
            probe = self._probes[commit.seq_id]
            if probe.idle >= probe.wait:
                probe.tried(self.MAX_WAIT_FREE if profile.free else self.MAX_WAIT)
        # A step that prefills is no measure of the overhead.
        measure = decoding == len(commits) and all(commit.fed == 1 for commit in commits)
        nodes = sum(commit.drafted for commit in commits)
        self._steps.end(len(commits), nodes, seconds if measure else None)

    def forget(self, seq_id: int) -> None:
        self._acceptance.forget(seq_id)
        self._probes.pop(seq_id, None)
        self._wished.pop(seq_id, None)

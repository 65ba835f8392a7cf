"""Batches in simulated time: what a controller makes of costs and acceptance that may be hostile.

Nothing is decoded: requests gain as many tokens as chance says, steps take as long as the true
costs say, and the controller is told both. Plain decoding is the same machine without drafts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from paceline.control.adaptive import AdaptiveController
from paceline.control.cost import CostModel
from paceline.core.batch import Commit, Slice
from paceline.core.costs import CostCurve, DrafterCosts, TargetCosts
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.draft.base import LookupDrafter

Rate = Callable[[int, int], float]  # (sequence, tokens written) -> chance of the next drafted token
SIZES = (2, 4, 8, 16)


def steady(rate: float) -> Rate:
    return lambda number, written: rate


@dataclass(frozen=True)
class Truth:
    """What things take. A step over one token takes 1."""

    sequence: float = 0.03  # a further sequence
    row: float = 0.03  # a further row of a sequence
    ragged: float = 1.08  # where sequences differ in their rows
    level: float = 0.15  # a pass of the drafter; 0: it looks something up
    first: float = 0.0  # what the first pass of a draft takes more
    level_row: float = 0.01  # a pass, for each further sequence
    reads: bool = False  # whether the drafter reads prompts by itself: a row for each token
    handling: float = 0.005  # of a lookup, each sequence
    found: float = 1.0  # how often a lookup finds anything
    wide: int = 1  # nodes of a level
    one_pass: bool = False  # all levels come from one pass, as with heads
    noise: float = 0.04
    hiccups: float = 0.005  # share of steps that are disturbed
    drift: Callable[[int], float] = field(default=lambda step: 1.0)  # of the whole machine

    def rest(self, lengths: Sequence[int]) -> float:
        rows = self.wide * sum(lengths)
        seconds = 1 + self.sequence * (len(lengths) - 1) + self.row * rows
        return seconds * (self.ragged if len(set(lengths)) > 1 else 1.0)

    def drafting(self, lengths: Sequence[int]) -> float:
        if not self.level:
            return self.handling * sum(length > 0 for length in lengths)
        levels = 1 if self.one_pass else max(lengths, default=0)
        passes = [sum(n > level for n in lengths) for level in range(levels) if any(lengths)]
        more = self.first if any(lengths) else 0.0
        return more + sum(self.level + self.level_row * (count - 1) for count in passes)


def believed(truth: Truth, batch: int, target: float = 1.0, rows: float = 1.0) -> TargetCosts:
    """Start-up's measurement; ``target`` and ``rows`` times what things really take."""

    def curve(sequences: int) -> CostCurve:
        counts = (1, 2, 3, 5, 9, 17, 33)
        base = target * (1 + truth.sequence * (sequences - 1))
        each = target * rows * truth.row * sequences
        return CostCurve(counts, tuple(base + each * (count - 1) for count in counts))

    sizes = sorted({1, batch, *(size for size in SIZES if size < batch)})
    return TargetCosts(tuple(sizes), tuple(map(curve, sizes)))


def profile(truth: Truth, batch: int, wrong: float = 1.0, longest: int = 8) -> DrafterCosts:
    """A drafter of chains; ``wrong`` times the seconds that a pass really takes."""
    longest *= 1 if truth.level else 2
    lengths = tuple(range(longest + 1))
    full = truth.level + truth.level_row * (batch - 1)
    seconds = CostCurve((1, max(batch, 2)), (wrong * truth.level, wrong * full))
    passes = lengths if truth.level else (0,) * len(lengths)
    if truth.one_pass:
        passes = tuple(min(length, 1) for length in lengths)
    nodes = tuple(truth.wide * length for length in lengths)
    if not truth.level:
        seconds = CostCurve((1,), (0.0,))
    return DrafterCosts(nodes, passes, seconds, needs_prefill=truth.reads)


@dataclass
class Outcome:
    """Simulated seconds, and what plain decoding would have taken for the same requests."""

    seconds: float = 0.0
    plain: float = 0.0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    slowest: float = 1.0  # the request that fared worst: its plain seconds by its seconds
    steps: list[tuple[int, float]] = field(default_factory=list)  # sequences, seconds

    @property
    def ratio(self) -> float:
        return self.plain / self.seconds


class Looked(LookupDrafter):
    """What lookups find: ``wide`` nodes a level, right as far as ``kept`` says."""

    name = "it"

    def __init__(self, truth: Truth, rate: Rate, dice: random.Random) -> None:
        super().__init__()
        self.truth, self.rate, self.dice = truth, rate, dice
        self.kept: dict[int, int] = {}

    def propose_one(self, item: Slice) -> tuple[Sequence[int], Sequence[int]]:
        seq, length, wide = item.seq, item.draft_length, self.truth.wide
        kept = self.kept[seq.seq_id] = _kept(
            self.dice, length, lambda level: self.rate(seq.seq_id, seq.generated + level)
        )
        if self.dice.random() >= self.truth.found:
            return (), ()
        tokens = [1 if not i % wide and i // wide < kept else -1 for i in range(wide * length)]
        return tokens, [i // wide * wide - wide if i >= wide else -1 for i in range(len(tokens))]


def _kept(dice: random.Random, length: int, rate: Callable[[int], float]) -> int:
    return next((n for n in range(length) if dice.random() >= rate(n)), length)


class Batches:
    """Waves of requests under one controller."""

    def __init__(
        self,
        truth: Truth,
        rate: Rate,
        batch: int,
        control: AdaptiveController | None = None,
        wrong: tuple[float, float, float] = (1.0, 1.0, 1.0),
        seed: int = 0,
    ) -> None:
        """``wrong``: how start-up took target steps, their rows and passes, by the truth."""
        self.truth, self.rate, self.batch = truth, rate, batch
        self.dice = random.Random(seed)
        self.lookup = None if truth.level else Looked(truth, rate, self.dice)
        target, rows, passes = wrong
        if control is None:
            known = believed(truth, batch, target, rows)
            cost = CostModel(known, {"it": profile(truth, batch, passes)})
            control = AdaptiveController(cost, None, {"it": self.lookup} if self.lookup else {})
        self.control = control
        self.number = 0
        self.step = 0
        self._read: dict[int, int] = {}

    def wave(self, tokens: int, batch: int | None = None, prompt: int = 40) -> Outcome:
        """So many requests at once, of so many tokens each, until the last one is done."""
        batch = batch or self.batch
        out = Outcome()
        seqs = []
        for _ in range(batch):
            params = SamplingParams(max_tokens=tokens)
            seqs.append(SequenceState(self.number, [1] * prompt, prompt, params, cached=prompt - 1))
            self.number += 1
        began = {seq.seq_id: 0.0 for seq in seqs}
        while seqs:
            self._step(seqs, out)
            for seq in [seq for seq in seqs if seq.remaining <= 0]:
                own = tokens * self.truth.rest([0] * batch)
                out.slowest = min(out.slowest, own / (out.seconds - began[seq.seq_id]))
                self.control.forget(seq.seq_id)
                seqs.remove(seq)
        out.plain = tokens * self.truth.rest([0] * batch)
        return out

    def _step(self, seqs: Sequence[SequenceState], out: Outcome) -> None:
        truth, dice = self.truth, self.dice
        lengths = [choice.length for choice in self.control.lengths(seqs)]
        lengths = [max(0, min(n, seq.remaining - 1)) for n, seq in zip(lengths, seqs, strict=True)]
        commits = []
        for seq, length in zip(seqs, lengths, strict=True):
            rate = partial(self._rate, seq)
            kept = _kept(dice, length, rate)
            if self.lookup is not None:
                kept = min(length, self.lookup.kept.get(seq.seq_id, 0))
            commits.append(
                Commit(
                    seq.seq_id,
                    (1,) * (kept + 1),
                    tuple(range(kept)),
                    drafted=length * truth.wide,
                    levels=length,
                    reached=min(kept + 1, length),
                    scheduled=1,
                    position=seq.cached,
                    finish_reason="length" if seq.remaining <= kept + 1 else None,
                )
            )
            seq.tokens += [1] * (kept + 1)
            seq.cached += kept + 1
            out.drafted += length
            out.accepted += kept
            out.tokens += kept + 1
        self.step += 1
        speed = truth.drift(self.step) * dice.lognormvariate(0.0, truth.noise)
        if dice.random() < truth.hiccups:
            speed *= 3
        drafting = truth.drafting(lengths) + self._reading(commits)
        rest = truth.rest(lengths)
        self.control.observe(commits, (rest + drafting) * speed, drafting * speed)
        out.seconds += rest + drafting  # noise is no fault of ours
        out.steps.append((len(seqs), rest + drafting))

    def _rate(self, seq: SequenceState, level: int) -> float:
        return self.rate(seq.seq_id, seq.generated + level)

    def _reading(self, commits: Sequence[Commit]) -> float:
        """A model reads what it has not seen of a sequence: by a further row for each token."""
        rows = 0
        for commit in commits:
            if commit.drafted:
                rows += max(0, commit.position - self._read.get(commit.seq_id, 0))
                self._read[commit.seq_id] = commit.position + len(commit.tokens)
        return self.truth.level_row * rows if self.truth.reads else 0.0

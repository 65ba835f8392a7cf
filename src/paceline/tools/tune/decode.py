"""What tuning reads from decoding prompts: each step's seconds, and how its drafts fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState
from paceline.engine.driver import Drive, DrivenStep, sequence

if TYPE_CHECKING:
    from paceline.llm import LLM


@dataclass(frozen=True)
class MeasuredStep:
    """One engine step that decoded only: ``nodes`` verified over ``batch`` sequences gained so
    many ``tokens``; the rest are seconds."""

    batch: int
    nodes: int
    tokens: int
    draft: float
    target: float
    other: float
    full: bool  # every sequence had room for the longest draft

    @property
    def seconds(self) -> float:
        return self.draft + self.target + self.other


@dataclass
class Levels:
    """How drafts fared, level by level, over the steps that had room for the longest."""

    longest: int
    steps: int = 0
    nodes: int = 0
    accepted: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted = self.accepted or [0] * self.longest
        self.reached = self.reached or [0] * self.longest

    def record(self, commit: Commit) -> None:
        self.steps += 1
        self.nodes += commit.drafted
        for level in range(self.longest):
            self.accepted[level] += level < len(commit.path)
            self.reached[level] += level < commit.reached

    def add(self, other: Levels) -> None:
        self.steps += other.steps
        self.nodes += other.nodes
        for level in range(self.longest):
            self.accepted[level] += other.accepted[level]
            self.reached[level] += other.reached[level]

    def survival(self) -> tuple[float, ...]:
        return tuple(won / max(1, self.steps) for won in self.accepted)

    def acceptance(self) -> tuple[float, ...]:
        """Conditional, up to the last position that any draft reached."""
        pairs = zip(self.accepted, self.reached, strict=True)
        return tuple(won / tried for won, tried in pairs if tried)


@dataclass
class Run:
    """What a run took and yielded. ``seconds`` is wall time, prompts included."""

    levels: Levels
    concurrency: int = 1
    steps: list[MeasuredStep] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    target_steps: int = 0  # summed over sequences
    drafted: int = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def decode(
    llm: LLM,
    prompts: Sequence[list[int]],
    concurrency: int,
    params: SamplingParams,
    longest: int = 0,
) -> Run:
    """Decode all prompts, ``concurrency`` at a time, each up to its end or ``max_tokens``.

    ``longest``: levels of the drafts, of which acceptance is counted. Raises PacelineError if a
    request fails.
    """
    stops = frozenset[int]() if params.ignore_eos else llm.end_tokens
    drive = Drive(llm.engine, [sequence(ids, params, stops) for ids in prompts], concurrency).run()
    counts = drive.counts
    run = Run(Levels(longest), concurrency, seconds=drive.seconds)
    run.outputs = [seq.tokens[seq.prompt_length :] for seq in drive.seqs]
    run.target_steps, run.drafted = counts.target_steps, counts.drafted
    seqs = {seq.seq_id: seq for seq in drive.seqs}
    for step in drive.steps:
        unhindered = [_remaining(seqs[c.seq_id], c) > longest for c in step.commits]
        for commit, free in zip(step.commits, unhindered, strict=True):
            if commit.tokens and free and commit.finish_reason is None:
                run.levels.record(commit)
        if step.decodes:
            run.steps.append(_measured(step, all(unhindered)))
    return run


def _remaining(seq: SequenceState, commit: Commit) -> int:
    """Tokens that the request might still get when the step began."""
    generated = max(0, commit.position + commit.scheduled - seq.prompt_length)
    return seq.params.max_tokens - generated


def _measured(step: DrivenStep, full: bool) -> MeasuredStep:
    return MeasuredStep(
        batch=len(step.commits),
        nodes=sum(commit.drafted for commit in step.commits),
        tokens=sum(len(commit.tokens) for commit in step.commits),
        draft=step.seconds["draft"],
        target=step.seconds["target"],
        other=step.seconds["verify"] + step.seconds["other"],
        full=full,
    )

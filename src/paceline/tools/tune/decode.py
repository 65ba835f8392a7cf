"""Decoding prompts on an engine step by step, with the clock and the counters read each time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.batch import Commit
from paceline.core.params import SamplingParams
from paceline.core.sequence import SequenceState

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

    ``longest``: levels of the drafts, of which acceptance is counted.
    """
    run = Run(Levels(longest), concurrency)
    stops = frozenset() if params.ignore_eos else llm.end_tokens
    waiting = deque(
        SequenceState(number, list(ids), len(ids), params, stop_ids=stops)
        for number, ids in enumerate(prompts)
    )
    everyone = list(waiting)
    running: dict[int, SequenceState] = {}
    start = time.perf_counter()
    try:
        while waiting or running:
            while waiting and len(running) < concurrency:
                seq = waiting.popleft()
                running[seq.seq_id] = seq
                llm.engine.add(seq)
            _step(llm, run, running)
    finally:
        run.seconds = time.perf_counter() - start
        for seq_id in running:
            llm.engine.abort(seq_id)
    run.outputs = [seq.tokens[seq.prompt_length :] for seq in everyone]
    run.target_steps = sum(seq.counts.target_steps for seq in everyone)
    run.drafted = sum(seq.counts.drafted for seq in everyone)
    return run


def _step(llm: LLM, run: Run, running: dict[int, SequenceState]) -> None:
    engine, levels = llm.engine, run.levels
    unhindered = {seq_id: seq.remaining > levels.longest for seq_id, seq in running.items()}
    before = engine.clock.totals()
    commits = engine.step()
    after = engine.clock.totals()
    for commit in commits:
        if commit.tokens and unhindered[commit.seq_id] and commit.finish_reason is None:
            levels.record(commit)
        if commit.finish_reason is not None:
            del running[commit.seq_id]
    if commits and all(commit.tokens and commit.scheduled == 1 for commit in commits):
        spent = {phase: after[phase] - before[phase] for phase in after}
        run.steps.append(
            MeasuredStep(
                batch=len(commits),
                nodes=sum(commit.drafted for commit in commits),
                tokens=sum(len(commit.tokens) for commit in commits),
                draft=spent["draft"],
                target=spent["target"],
                other=spent["verify"] + spent["other"],
                full=all(unhindered[commit.seq_id] for commit in commits),
            )
        )

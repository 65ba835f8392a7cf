"""Contestants over one loaded target, decoding waves of requests at a given concurrency."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, sequence

if TYPE_CHECKING:
    from paceline.llm import LLM


@dataclass(frozen=True)
class StepTrace:
    """One target step: when it ended, its sequences, and draft nodes per sequence."""

    moment: float
    sequences: int
    nodes: float


@dataclass
class Part:
    """A stretch of every request: tokens and seconds, summed over the requests."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Run:
    """What some waves did: new tokens, wall seconds, drafts, texts, and their steps."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    target_steps: int = 0  # of all sequences
    texts: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)
    late_tokens: int = 0  # after each request's first ``early`` tokens
    late_seconds: float = 0.0
    cpu: float = 0.0  # processor seconds of this process: others disturb them less
    drafting: int = 0  # steps of sequences that drafted anything
    waves: list[float] = field(default_factory=list)  # tokens a second of each
    parts: list[Part] = field(default_factory=list)  # between marks, see together

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def late_speed(self) -> float:
        return self.late_tokens / self.late_seconds

    @property
    def length(self) -> float:
        """Mean draft nodes of a sequence's step."""
        return self.drafted / max(1, self.target_steps)


class Wave:
    """Requests that one contestant decodes together, on a clock that runs while it works."""

    def __init__(
        self, contestant: Contestant, prompts: Sequence[list[int]], params: SamplingParams
    ) -> None:
        seqs = [sequence(ids, params, contestant.ends) for ids in prompts]
        self.drive = Drive(contestant.llm.engine, seqs)
        self.cpu = 0.0
        self.late: tuple[float, int] | None = None

    def advance(self, early: int = 0) -> None:
        """One step of the engine."""
        cpu = time.process_time()
        self.drive.step()
        self.cpu += time.process_time() - cpu
        slowest = min(seq.generated for seq in self.drive.seqs)
        if early and self.late is None and slowest >= early:
            self.late = (self.drive.seconds, self.drive.tokens)

    def end(self, run: Run, marks: Sequence[int] = ()) -> None:
        """Drop what is left, and add all to ``run``."""
        drive = self.drive
        drive.close()
        run.cpu += self.cpu
        run.seconds += drive.seconds
        run.tokens += drive.tokens
        run.waves.append(drive.tokens / drive.seconds)
        if self.late is not None:
            run.late_seconds += drive.seconds - self.late[0]
            run.late_tokens += drive.tokens - self.late[1]
        arrivals: dict[int, list[tuple[float, int]]] = {seq.seq_id: [] for seq in drive.seqs}
        for step in drive.steps:
            nodes = sum(commit.drafted for commit in step.commits) / len(step.commits)
            run.steps.append(StepTrace(step.ended, len(step.commits), nodes))
            for commit in step.commits:
                run.drafting += commit.drafted > 0
                if commit.tokens:
                    arrivals[commit.seq_id].append((step.ended, len(commit.tokens)))
        for seq in drive.seqs:
            if marks:
                _add(run.parts, parts_of(arrivals[seq.seq_id], marks, seq.generated))
            run.texts.append(tuple(seq.tokens[seq.prompt_length :]))
        counts = drive.counts
        run.drafted += counts.drafted
        run.accepted += counts.accepted
        run.target_steps += counts.target_steps


class Contestant:
    """An LLM that decodes the same prompts as the others, to the same number of tokens.

    ``ends`` are tokens that end a request before; greedy requests of all then end alike.
    """

    def __init__(self, name: str, llm: LLM, ends: frozenset[int] = frozenset()) -> None:
        self.name = name
        self.llm = llm
        self.ends = ends

    def run(
        self,
        prompts: Sequence[list[int]],
        concurrency: int,
        tokens: int,
        temperature: float = 0.0,
        early: int = 0,
    ) -> Run:
        """Waves of ``concurrency`` requests at once, of ``tokens`` new tokens each.

        Prefill counts; nothing but ``ends`` ends a request before. What comes after the first
        ``early`` tokens of a wave's requests is counted apart, too: from the step in which the
        last of them has so many.
        """
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        run = Run()
        for first in range(0, len(prompts), concurrency):
            wave = Wave(self, prompts[first : first + concurrency], params)
            try:
                while wave.drive.busy:
                    wave.advance(early)
            finally:
                wave.end(run)
        return run


def together(
    contestants: Sequence[Contestant],
    prompts: Sequence[list[int]],
    concurrency: int,
    params: SamplingParams,
    marks: Sequence[int],
    turn: float = 0.1,
) -> list[Run]:
    """The same waves by all contestants, who take turns of ``turn`` seconds, at least a step.

    Each has a clock of its own. So the machine's moods meet all of them alike: where runs one after
    another differ by 10 % for no reason, these differ by 1 %. With ``marks`` every request's time
    is told apart where it has so many tokens (``Run.parts``).
    """
    runs = [Run() for _ in contestants]
    for first in range(0, len(prompts), concurrency):
        part = prompts[first : first + concurrency]
        waves = [Wave(one, part, params) for one in contestants]
        try:
            while any(wave.drive.busy for wave in waves):
                for wave in waves:
                    until = wave.drive.seconds + turn
                    while wave.drive.busy and wave.drive.seconds < until:
                        wave.advance()
        finally:
            for wave, run in zip(waves, runs, strict=True):
                wave.end(run, marks)
    return runs


def moment(arrivals: Sequence[tuple[float, int]], count: int) -> float:
    """When a request had ``count`` tokens; a step's tokens came evenly in the time it took."""
    before, have = 0.0, 0
    for now, tokens in arrivals:
        if have + tokens >= count:
            return before + (now - before) * (count - have) / tokens
        before, have = now, have + tokens
    return before


def parts_of(arrivals: Sequence[tuple[float, int]], marks: Sequence[int], last: int) -> list[Part]:
    """The stretches of one request up to each mark and from there to ``last``."""
    bounds = [0, *(mark for mark in marks if mark < last), last]
    times = [0.0, *(moment(arrivals, bound) for bound in bounds[1:])]
    return [
        Part(after - before, then - since)
        for (before, after), (since, then) in zip(pairwise(bounds), pairwise(times), strict=True)
    ]


def _add(sums: list[Part], parts: Sequence[Part]) -> None:
    sums.extend(Part() for _ in parts[len(sums) :])
    for own, part in zip(sums, parts, strict=False):  # a request may end before a mark
        own.tokens += part.tokens
        own.seconds += part.seconds

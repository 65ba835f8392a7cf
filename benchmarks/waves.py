"""Contestants over one loaded target, decoding waves of requests at a given concurrency."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core.params import SamplingParams
from paceline.core.sequence import Sequence as Request

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
    parts: list[Part] = field(default_factory=list)  # between marks, see Contestant.run

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


def moment(arrivals: Sequence[tuple[float, int]], start: float, count: int) -> float:
    """When a request had ``count`` tokens; a step's tokens came evenly in the time it took."""
    before, have = start, 0
    for now, tokens in arrivals:
        if have + tokens >= count:
            return before + (now - before) * (count - have) / tokens
        before, have = now, have + tokens
    return before


def parts_of(
    arrivals: Sequence[tuple[float, int]], start: float, marks: Sequence[int], last: int
) -> list[Part]:
    """The stretches of one request up to each mark and from there to ``last``."""
    bounds = [0, *(mark for mark in marks if mark < last), last]
    times = [start, *(moment(arrivals, start, bound) for bound in bounds[1:])]
    return [
        Part(after - before, then - since)
        for (before, after), (since, then) in zip(pairwise(bounds), pairwise(times), strict=True)
    ]


class Contestant:
    """An LLM that decodes the same prompts as the others, to the same number of tokens."""

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self._ids = itertools.count()

    def run(
        self,
        prompts: Sequence[list[int]],
        concurrency: int,
        tokens: int,
        temperature: float = 0.0,
        early: int = 0,
        marks: Sequence[int] = (),
    ) -> Run:
        """Waves of ``concurrency`` requests at once, of ``tokens`` new tokens each.

        Prefill counts; end tokens do not end a request. What comes after the first ``early``
        tokens of a wave's requests is counted apart, too: from the step in which the last of them
        has so many. With ``marks`` every request's time is also told apart there (``Run.parts``).
        """
        params = SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True)
        run = Run()
        for first in range(0, len(prompts), concurrency):
            self._wave(prompts[first : first + concurrency], params, early, marks, run)
        return run

    def _wave(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        early: int,
        marks: Sequence[int],
        run: Run,
    ) -> None:
        engine = self.llm.engine
        seqs = [Request(next(self._ids), list(ids), len(ids), params) for ids in prompts]
        late: tuple[float, int] | None = None
        cpu = time.process_time()
        start = now = time.perf_counter()
        try:
            for seq in seqs:
                engine.add(seq)
            while engine.has_work:
                commits = engine.step()
                now = time.perf_counter()
                nodes = sum(commit.drafted for commit in commits) / len(commits)
                run.drafting += sum(commit.drafted > 0 for commit in commits)
                run.steps.append(StepTrace(now, len(commits), nodes))
                if early and late is None and min(seq.generated for seq in seqs) >= early:
                    late = (now, sum(seq.generated for seq in seqs))
        finally:
            for seq in seqs:
                engine.abort(seq.seq_id)
        run.cpu += time.process_time() - cpu
        run.seconds += now - start
        run.tokens += sum(seq.generated for seq in seqs)
        run.waves.append(sum(seq.generated for seq in seqs) / (now - start))
        if late is not None:
            run.late_seconds += now - late[0]
            run.late_tokens += sum(seq.generated for seq in seqs) - late[1]
        for seq in seqs:
            if marks:
                _add(run.parts, parts_of(seq.arrivals, start, marks, params.max_tokens))
            run.drafted += seq.counts.drafted
            run.accepted += seq.counts.accepted
            run.target_steps += seq.counts.target_steps
            run.texts.append(tuple(seq.tokens[seq.prompt_length :]))


def _add(sums: list[Part], parts: Sequence[Part]) -> None:
    sums.extend(Part() for _ in parts[len(sums) :])
    for own, part in zip(sums, parts, strict=True):
        own.tokens += part.tokens
        own.seconds += part.seconds

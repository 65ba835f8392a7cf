"""Outcomes and opened_all made by hand, with times that are known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.params import SamplingParams
from paceline.core.sequence import DraftCounts
from paceline.engine.driver import StepTotals
from paceline.lab.bench.runner import BenchJob, BenchRequest, JobResult, TimedAnswer, TimedRun


def request(
    *prompt: int, tokens: int = 4, temperature: float = 0.0, seed: int | None = None
) -> BenchRequest:
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
    return BenchRequest(prompt or (1, 2, 3), params)


def job(category: str = "chat", index: int = 0, clients: int = 1, **options: float) -> BenchJob:
    requests = tuple(request(index + 1, 2, n + 1) for n in range(clients))
    return BenchJob(category, clients, options.get("temperature", 0.0), index, requests)


def outcome(
    seconds: float,
    arrivals: Sequence[tuple[float, int]] = ((1.0, 1), (2.0, 3)),
    decoding: StepTotals = StepTotals(),  # noqa: B008
    **counts: Any,
) -> TimedRun:
    """One answer whose tokens are 0, 1, 2 ..., a step for each delivery."""
    tokens = tuple(range(sum(count for _, count in arrivals)))
    answers = [TimedAnswer(tokens, tuple(arrivals))]
    counted = DraftCounts(target_steps=len(arrivals), **counts)
    return TimedRun(answers, seconds, counted, decoding)


def sums(steps: int, seconds: dict[str, float]) -> StepTotals:
    """Steps of one sequence each, all that only decoded; seconds of all of them by phase."""
    return StepTotals(steps, steps, seconds=seconds)


def job_result(turn: int, where: BenchJob, **seconds: float) -> JobResult:
    return JobResult(where, turn, {name: outcome(value) for name, value in seconds.items()})


@dataclass
class Fake:
    """Answers at once with ``tokens``, in so many seconds by its own account; keeps a diary."""

    name: str
    diary: list[str] = field(default_factory=list)
    seconds: float = 1.0
    tokens: tuple[int, ...] = (5, 6, 7, 8)
    drafted: int = 0
    accepted: int = 0
    interrupted_at: int | None = None  # the run in which Ctrl-C comes
    runs: int = 0

    def refresh(self) -> None:
        self.diary.append(f"{self.name} refreshed")

    def run(self, requests: Sequence[BenchRequest]) -> TimedRun:
        self.runs += 1
        if self.runs == self.interrupted_at:
            raise KeyboardInterrupt
        self.diary.append(f"{self.name} {requests[0].prompt[0]} x{requests[0].params.max_tokens}")
        answers = [TimedAnswer(self.tokens, ((self.seconds, len(self.tokens)),)) for _ in requests]
        counts = DraftCounts(len(requests), self.drafted, accepted=self.accepted)
        return TimedRun(answers, self.seconds, counts)

"""What is asked of an engine, and what a timed run of it gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Protocol

from paceline.core.params import SamplingParams
from paceline.engine.driver import DraftCounts, StepSums


@dataclass(frozen=True)
class Ask:
    """One request: a prompt's token ids, and how to go on from it."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class TimedAnswer:
    """New tokens, and when they came: ``(seconds since the request was sent, tokens)``.
    ``written``: how many its engine counted, where the ids are those of a text read again."""

    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    written: int | None = None

    @property
    def count(self) -> int:
        return len(self.tokens) if self.written is None else self.written


@dataclass(frozen=True)
class TimedRun:
    """One timed run over some requests, answers in their order. Times in seconds.

    ``counts`` of all requests; ``tells_drafted``: the engine says how many tokens were drafted.
    ``decoding`` sums the steps in which nobody read a prompt. Of a conversation ``asks`` are its
    turns; ``cut``: later turns had no room in the context.
    """

    answers: Sequence[TimedAnswer]
    seconds: float
    counts: DraftCounts
    decoding: StepSums = field(default_factory=StepSums)
    asks: tuple[Ask, ...] = ()
    cut: bool = False
    tells_drafted: bool = True

    @property
    def tokens(self) -> int:
        return sum(answer.count for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        steps = self.counts.target_steps
        return self.tokens / steps if steps else 0.0


def merged(runs: Sequence[TimedRun]) -> TimedRun:
    """Runs of one engine as one."""
    return TimedRun(
        answers=[answer for run in runs for answer in run.answers],
        seconds=sum(run.seconds for run in runs),
        counts=sum((run.counts for run in runs), DraftCounts()),
        decoding=sum((run.decoding for run in runs), StepSums()),
        asks=tuple(ask for run in runs for ask in run.asks),
        cut=any(run.cut for run in runs),
        tells_drafted=all(run.tells_drafted for run in runs),
    )


class BenchEngine(Protocol):
    """Something that answers requests; what is to be compared."""

    name: str

    def refresh(self) -> None:
        """Forget what earlier requests taught it: a round begins, with the same prompts."""
        return

    def close(self) -> None:
        """Free what it holds."""
        return

    def run(self, asks: Sequence[Ask]) -> TimedRun:
        """Answer all, from reading the prompts on; timed."""


@dataclass(frozen=True)
class BenchJob:
    """Requests that an engine answers in one timed run. ``index`` tells the jobs of one category,
    concurrency and temperature apart."""

    category: str
    concurrency: int
    temperature: float
    index: int
    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Heat:
    """One job in one round: the outcome of every engine, by name."""

    job: BenchJob
    turn: int
    outcomes: dict[str, TimedRun]


@dataclass
class HeatRecord:
    """The heats whose last engine is done. ``rounds`` are wanted, ``spent`` seconds went into it;
    both grow if a later run goes on from it."""

    heats: list[Heat] = field(default_factory=list)
    rounds: int = 0
    spent: float = 0.0

    def has(self, job: BenchJob, turn: int) -> bool:
        key = attrgetter("category", "concurrency", "temperature", "index")
        return any((heat.turn, key(heat.job)) == (turn, key(job)) for heat in self.heats)

    def of(self, concurrency: int, temperature: float) -> list[Heat]:
        """The heats at one concurrency and temperature."""
        cell = concurrency, temperature
        return [h for h in self.heats if (h.job.concurrency, h.job.temperature) == cell]

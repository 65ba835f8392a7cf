"""Requests, engines and timed runs. In every round every engine does every job; the order of the
engines rotates from job to job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any, Literal, Protocol

from paceline.core.params import SamplingParams
from paceline.drafters import parse_draft
from paceline.engine.driver import DraftCounts, StepTotals
from paceline.lab.bench.prompts import Element, interleave
from paceline.lab.budget import Budget, Spending

Length = int | Literal["auto"]


@dataclass(frozen=True)
class Method:
    """One entry of a comparison. ``draft``: a draft spec, None for plain decoding."""

    name: str
    draft: str | None = None
    length: Length = "auto"

    @property
    def learns_across_requests(self) -> bool:
        return any(member.learns_across_requests for member in parse_draft(self.draft).members())


@dataclass(frozen=True)
class BenchRequest:
    """One request: the token ids of a prompt, and sampling parameters."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class TimedAnswer:
    """New tokens, and their deliveries: ``(seconds since the request was sent, tokens)``."""

    tokens: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """(seconds since the previous delivery, tokens delivered), from the second delivery on."""
        return [(end - start, count) for (start, _), (end, count) in pairwise(self.arrivals)]


@dataclass(frozen=True)
class TimedRun:
    """One timed run over some requests, with the answers in their order. Times in seconds.

    ``counts``: draft counts of all requests. ``decoding``: sums over the steps without prefill."""

    answers: Sequence[TimedAnswer]
    seconds: float
    counts: DraftCounts
    decoding: StepTotals = field(default_factory=StepTotals)

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        steps = self.counts.target_steps
        return self.tokens / steps if steps else 0.0


def merged(runs: Sequence[TimedRun]) -> TimedRun:
    return TimedRun(
        answers=[answer for run in runs for answer in run.answers],
        seconds=sum(run.seconds for run in runs),
        counts=sum((run.counts for run in runs), DraftCounts()),
        decoding=sum((run.decoding for run in runs), StepTotals()),
    )


def rotated(items: Sequence[Element], turn: int) -> list[Element]:
    """The items in rotated order: another one is first in every turn."""
    shift = turn % len(items)
    return [*items[shift:], *items[:shift]]


class BenchEngine(Protocol):
    """An engine that is compared with others."""

    name: str

    def refresh(self) -> None:
        """Forget what the drafter learnt from requests; called before a round repeats them."""
        return

    def run(self, requests: Sequence[BenchRequest]) -> TimedRun:
        """Answer all requests and measure the time, prefill included."""


@dataclass(frozen=True)
class BenchJob:
    """The requests of one timed run; ``index`` distinguishes jobs of one category and setting."""

    category: str
    concurrency: int
    temperature: float
    index: int
    requests: tuple[BenchRequest, ...]


@dataclass(frozen=True)
class JobResult:
    """The results of one job in one round: the run of each engine, by its name."""

    job: BenchJob
    round_index: int
    runs: dict[str, TimedRun]


ALL_PROMPTS = "all prompts"
_WARM_UP_TOKENS = 16
_MIN_REQUESTS = 2  # per client, if there are several clients
OnProgress = Callable[[str], None]  # receives a description of the next run


def warm_up(todo: Sequence[BenchJob], engines: Sequence[BenchEngine]) -> None:
    """A short untimed run of all engines at each concurrency and temperature, which allocates
    buffers, compiles kernels and does lazy imports."""
    shapes = {(job.concurrency, job.temperature): job for job in reversed(todo)}
    for job in shapes.values():
        requests = []
        for request in job.requests[: job.concurrency]:
            tokens = min(_WARM_UP_TOKENS, request.params.max_tokens)
            params = replace(request.params, max_tokens=tokens)
            requests.append(replace(request, params=params))
        for engine in engines:
            engine.run(requests)


def take_turns(
    todo: Sequence[BenchJob],
    engines: Sequence[BenchEngine],
    rounds: int,
    record: list[JobResult],
    advance: OnProgress = lambda description: None,
    budget: Budget | None = None,
) -> None:
    """Let all engines do every job ``rounds`` times and append the results to ``record``. All jobs
    have the same concurrency. The order of the engines rotates from job to job. The budget may end
    the first round after any job; a later round is started only if there is as much time as the
    one before took. ``advance(description)`` is called before every run. KeyboardInterrupt is
    passed on."""
    budget, round_seconds = budget or Budget(), 0.0
    for number in range(rounds):
        if number and budget.left <= round_seconds:
            break
        began = budget.spent
        for engine in engines:
            engine.refresh()
        for index, job in enumerate(todo):
            if not number and budget.left <= 0:
                break
            runs: dict[str, TimedRun] = {}
            for engine in rotated(engines, number + index):
                advance(f"{job.category}: {engine.name}")
                runs[engine.name] = engine.run(job.requests)
            record.append(JobResult(job, number, {e.name: runs[e.name] for e in engines}))
        round_seconds = budget.spent - began


CategoryPrompts = Sequence[tuple[str, Sequence[int]]]  # category and token ids


@dataclass(frozen=True)
class Sweep:
    """Settings of a benchmark: all prompts at every concurrency and temperature, ``rounds`` times.
    Request i has the seed ``seed + i``, or none if ``seed`` is None."""

    max_tokens: int
    concurrency: Sequence[int] = (1,)
    temperature: Sequence[float] = (0.0,)
    rounds: int = 1
    ignore_eos: bool = True
    seed: int | None = None

    def params(self, temperature: float, number: int) -> SamplingParams:
        seed = None if self.seed is None or not temperature else (self.seed + number) % 2**63
        ends: Any = {"max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos}
        return SamplingParams(temperature=temperature, seed=seed, **ends)

    def jobs(
        self, prompts: CategoryPrompts, concurrency: int, time_limited: bool = False
    ) -> list[BenchJob]:
        """The jobs of a round. At concurrency 1 each prompt is a job. Otherwise one job has all
        prompts, repeated so that all clients send the same number of requests, at least two;
        ``time_limited``: exactly two. Temperatures and categories are interleaved, because a budget
        may end the round after any job."""
        if concurrency == 1:
            groups = [(number, category, [ids]) for number, (category, ids) in enumerate(prompts)]
        else:
            needed = -(-len(prompts) // concurrency)  # requests per client, for all prompts
            per_client = _MIN_REQUESTS if time_limited else max(_MIN_REQUESTS, needed)
            repeated = [prompts[n % len(prompts)][1] for n in range(per_client * concurrency)]
            groups = [(0, ALL_PROMPTS, repeated)]
        planned = []
        for temperature, (number, category, group) in product(self.temperature, groups):
            numbered = enumerate(group, number)
            requests = tuple(
                BenchRequest(tuple(ids), self.params(temperature, n)) for n, ids in numbered
            )
            planned.append(BenchJob(category, concurrency, temperature, number, requests))
        return interleave(planned, lambda job: (job.temperature, job.category))

    def wanted(self, prompts: CategoryPrompts) -> int:
        """The number of jobs in a round."""
        return sum(len(self.jobs(prompts, n)) for n in self.concurrency)

    def run(
        self,
        prompts: CategoryPrompts,
        methods: Sequence[Method],
        start: Callable[[Method, int], BenchEngine],
        record: list[JobResult],
        advance: OnProgress = lambda description: None,
        budget: Budget | None = None,
    ) -> None:
        """Measure and append the results to ``record``. ``start(method, clients)`` creates an
        engine. Every concurrency has the same share of the budget. Raises what ``start`` raises."""
        budget = budget or Budget()
        for index, concurrency in enumerate(self.concurrency):
            share = budget.part(1 / (len(self.concurrency) - index))
            engines = []
            for method in methods:
                advance(f"loading {method.name}")
                engines.append(start(method, concurrency))
            todo = self.jobs(prompts, concurrency, time_limited=share.seconds is not None)
            advance("warming up")
            warm_up(todo, engines)
            take_turns(todo, engines, self.rounds, record, advance, share)


def spending_of(
    record: list[JobResult], sweep: Sweep, prompts: CategoryPrompts, budget: Budget
) -> Spending:
    """How the budget was spent. The unit is a turn: one job, measured for all methods."""
    settings, kind = product(sweep.concurrency, sweep.temperature), "turns of all methods"
    measured = {(job_result.job.concurrency, job_result.job.temperature) for job_result in record}
    missing = [f"{n} at once, temperature {t:g}" for n, t in settings if (n, t) not in measured]
    wanted = {kind: sweep.rounds * sweep.wanted(prompts)}
    done = {kind: len(record)}
    return Spending(budget.seconds, budget.spent, done, wanted, tuple(missing))

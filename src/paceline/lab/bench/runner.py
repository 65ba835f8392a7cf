"""What is asked of an engine, what a timed run of it gives back, and taking turns: every engine
does every job in every round, in rotating order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any, Literal, Protocol

from paceline.core.params import SamplingParams
from paceline.drafters import parse_draft
from paceline.engine.driver import DraftCounts, StepSums
from paceline.lab.bench.prompts import in_turn
from paceline.lab.budget import Budget, Spending

Length = int | Literal["auto"]


@dataclass(frozen=True)
class Method:
    """``draft``: a spec; None decodes plainly. ``url``: of a server, whose ``length`` is None."""

    name: str
    draft: str | None = None
    length: Length | None = "auto"
    url: str | None = None

    @property
    def remembers(self) -> bool:
        """Whether earlier requests help it with later ones."""
        return any(member.remembers for member in parse_draft(self.draft).members())


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

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """(seconds since the delivery before, tokens delivered), from the second delivery on."""
        return [(at - before, count) for (before, _), (at, count) in pairwise(self.arrivals)]


@dataclass(frozen=True)
class TimedRun:
    """One timed run over some requests, answers in their order. Times in seconds.

    ``counts`` of all requests; ``tells_drafted``: the engine says how many tokens were drafted.
    ``decoding`` sums the steps in which nobody read a prompt.
    """

    answers: Sequence[TimedAnswer]
    seconds: float
    counts: DraftCounts
    decoding: StepSums = field(default_factory=StepSums)
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
    """One job in one round, once all engines are done: their outcomes, by name."""

    job: BenchJob
    turn: int
    outcomes: dict[str, TimedRun]


EVERYTHING = "all prompts"
_WARM_TOKENS = 16
_ENDING = 0.15  # of a budget, for what is measured and judged once all have run
_WAVES = 2  # requests that each of several clients sends at least
OnProgress = Callable[[str], None]  # is told what runs next


def warm_up(todo: Sequence[BenchJob], engines: Sequence[BenchEngine]) -> None:
    """A short untimed run of all engines in each shape: buffers, kernels, lazy imports."""
    shapes = {(job.concurrency, job.temperature): job for job in reversed(todo)}
    for job in shapes.values():
        asks = [
            Ask(a.prompt, replace(a.params, max_tokens=min(_WARM_TOKENS, a.params.max_tokens)))
            for a in job.asks[: job.concurrency]
        ]
        for engine in engines:
            engine.run(asks)


def take_turns(
    todo: Sequence[BenchJob],
    engines: Sequence[BenchEngine],
    rounds: int,
    record: list[Heat],
    advance: OnProgress = lambda what: None,
    budget: Budget | None = None,
) -> None:
    """Let all do every job, of one concurrency, ``rounds`` times; fills the record heat by heat. In
    a heat the engines run in rotating order. The budget may end the first round at any heat; a
    later one is begun only if it fits. ``advance(what)`` is called before every run.
    KeyboardInterrupt passes through."""
    budget, kind = budget or Budget(), f"requests, {todo[0].concurrency} at once"
    for turn in range(rounds):
        if turn and not budget.fits(kind, sum(len(job.asks) for job in todo)):
            break
        for engine in engines:
            engine.refresh()
        for index, job in enumerate(todo):
            if not budget.fits(kind, len(job.asks)):
                break
            shift = (turn + index) % len(engines)
            outcomes: dict[str, TimedRun] = {}
            with budget.task(kind, len(job.asks)):
                for engine in [*engines[shift:], *engines[:shift]]:
                    advance(f"{job.category}: {engine.name}")
                    outcomes[engine.name] = engine.run(job.asks)
            record.append(Heat(job, turn, {e.name: outcomes[e.name] for e in engines}))


CategoryPrompts = Sequence[tuple[str, Sequence[int]]]  # category and token ids


@dataclass(frozen=True)
class Sweep:
    """Prompts at every concurrency and temperature, ``rounds`` times. ``seed``: request i gets
    ``seed + i``; None draws freely."""

    max_tokens: int
    concurrency: Sequence[int] = (1,)
    temperature: Sequence[float] = (0.0,)
    rounds: int = 1
    ignore_eos: bool = True
    seed: int | None = None

    def params(self, temperature: float, number: int) -> SamplingParams:
        """Of request ``number``."""
        seed = None if self.seed is None or not temperature else (self.seed + number) % 2**63
        how: Any = {"max_tokens": self.max_tokens, "ignore_eos": self.ignore_eos}
        return SamplingParams(temperature=temperature, seed=seed, **how)

    def jobs(
        self, prompts: CategoryPrompts, concurrency: int, hurried: bool = False
    ) -> list[BenchJob]:
        """One request at a time: a job a prompt. Several: one job over all prompts, repeated until
        all clients have sent equally many, two at least; ``hurried``: exactly two. Temperatures and
        categories take turns, as a budget may end the list anywhere."""
        if concurrency == 1:
            groups = [(number, category, [ids]) for number, (category, ids) in enumerate(prompts)]
        else:
            waves = _WAVES if hurried else max(_WAVES, -(-len(prompts) // concurrency))
            many = [prompts[n % len(prompts)][1] for n in range(waves * concurrency)]
            groups = [(0, EVERYTHING, many)]
        planned = []
        for temperature, (number, category, group) in product(self.temperature, groups):
            numbered = enumerate(group, number)
            asks = tuple(Ask(tuple(ids), self.params(temperature, n)) for n, ids in numbered)
            planned.append(BenchJob(category, concurrency, temperature, number, asks))
        return in_turn(planned, lambda job: (job.temperature, job.category))

    def wanted(self, prompts: CategoryPrompts) -> int:
        """How many heats a round has."""
        return sum(len(self.jobs(prompts, n)) for n in self.concurrency)

    def run(
        self,
        prompts: CategoryPrompts,
        methods: Sequence[Method],
        start: Callable[[Method, int], BenchEngine],
        record: list[Heat],
        advance: OnProgress = lambda what: None,
        budget: Budget | None = None,
    ) -> None:
        """Measure into ``record``. ``start(method, clients)`` makes an engine. Every concurrency
        has the same share of the budget. Raises what ``start`` raises."""
        budget = budget or Budget()
        for index, concurrency in enumerate(self.concurrency):
            share = budget.part(1 / (len(self.concurrency) - index))
            engines = []
            for method in methods:
                advance(f"loading {method.name}")
                engines.append(start(method, concurrency))
            todo = self.jobs(prompts, concurrency, hurried=share.seconds is not None)
            advance("warming up")
            warm_up(todo, engines)
            if share.seconds is not None:
                share.reserve = _ENDING * share.left
            take_turns(todo, engines, self.rounds, record, advance, share)


def spending_of(
    record: list[Heat], sweep: Sweep, prompts: CategoryPrompts, budget: Budget
) -> Spending:
    """In turns: one prompt, or one crowd, by all methods."""
    cells, kind = product(sweep.concurrency, sweep.temperature), "turns of all methods"
    measured = {(heat.job.concurrency, heat.job.temperature) for heat in record}
    missing = [f"{n} at once, temperature {t:g}" for n, t in cells if (n, t) not in measured]
    wanted = {kind: sweep.rounds * sweep.wanted(prompts)}
    done = {kind: len(record)}
    return Spending(budget.seconds, budget.spent, done, wanted, tuple(missing))

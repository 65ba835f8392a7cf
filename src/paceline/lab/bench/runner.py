"""Taking turns: every engine does every job in every round, in rotating order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import TypeVar

from paceline.core.params import SamplingParams
from paceline.lab.bench.methods import Method
from paceline.lab.bench.runs import Ask, BenchEngine, TimedRun
from paceline.lab.budget import Budget

OnHeat = Callable[[int, str], None]
EVERYTHING = "all prompts"
_WARM_TOKENS = 16
_ENDING = 0.15  # of a budget, for what is measured and judged once all have run
_WAVES = 2  # requests that each of several clients sends at least
Element = TypeVar("Element")


@dataclass(frozen=True)
class BenchJob:
    """Requests that a engine answers in one timed run.

    ``index`` tells the jobs of one category, concurrency and temperature apart.
    """

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


OnJob = Callable[[BenchEngine, BenchJob], TimedRun]  # how an engine does a job


@dataclass
class HeatRecord:
    """The heats so far. A heat is recorded when its last engine is done, so one that was
    interrupted leaves nothing, and in each all engines had the same machine. ``rounds`` are
    wanted, ``spent`` seconds went into it; both grow if a later run goes on from it."""

    heats: list[Heat] = field(default_factory=list)
    rounds: int = 0
    spent: float = 0.0

    def has(self, job: BenchJob, turn: int) -> bool:
        wanted = (turn, *_key(job))
        return any((heat.turn, *_key(heat.job)) == wanted for heat in self.heats)

    def names(self) -> list[str]:
        """Engines, in the order in which they were entered."""
        return list(dict.fromkeys(name for heat in self.heats for name in heat.outcomes))


def _key(job: BenchJob) -> tuple[str, int, float, int]:
    return job.category, job.concurrency, job.temperature, job.index


@dataclass(frozen=True)
class Settings:
    """How prompts become requests. ``seed``: request i gets ``seed + i``; None draws freely.
    ``limit``: most tokens of a prompt and its answer, where answers may be cut there."""

    max_tokens: int
    ignore_eos: bool = True
    seed: int | None = None
    limit: int | None = None

    def params(self, temperature: float, number: int, read: int = 0) -> SamplingParams:
        """Of request ``number``, whose prompt has ``read`` tokens."""
        seed = None if self.seed is None else (self.seed + number) % 2**63
        room = self.max_tokens if self.limit is None else self.limit - read
        return SamplingParams(
            temperature=temperature,
            max_tokens=min(self.max_tokens, room),
            ignore_eos=self.ignore_eos,
            seed=seed if temperature > 0 else None,
        )


def jobs(
    prompts: Iterable[tuple[str, Sequence[int]]],
    settings: Settings,
    concurrency: int,
    temperature: float,
    most_waves: float = float("inf"),
) -> list[BenchJob]:
    """Jobs over prompts, given as (category, token ids).

    One request at a time: a job a prompt. Several: one job over all prompts, repeated in turn
    until every client has sent at least two requests, and all equally many; fewer prompts take
    part if clients would send more than ``most_waves`` requests, two at least.
    """
    pairs = list(prompts)
    if concurrency == 1:
        numbered = [(number, category, [ids]) for number, (category, ids) in enumerate(pairs)]
    else:
        waves = max(_WAVES, int(min(-(-len(pairs) // concurrency), most_waves)))
        many = [pairs[n % len(pairs)][1] for n in range(waves * concurrency)]
        numbered = [(0, EVERYTHING, many)]
    return [
        BenchJob(
            category,
            concurrency,
            temperature,
            number,
            tuple(
                Ask(tuple(ids), settings.params(temperature, number + index, len(ids)))
                for index, ids in enumerate(group)
            ),
        )
        for number, category, group in numbered
    ]


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
    record: HeatRecord,
    advance: OnHeat = lambda steps, what: None,
    budget: Budget | None = None,
    warmed: bool = False,
    answer: OnJob = lambda one, job: one.run(job.asks),
) -> None:
    """Let all do every job ``rounds`` times; fills the record heat by heat.

    Within a heat the engines run one after another, so that all have the same machine; who
    begins changes from heat to heat. Heats that the record has are not run again. The budget may
    end the first round at any heat; a later one is begun only if the whole of it fits.
    ``advance(1, what)`` is called before every run (0 before the first) and at the end, with what
    runs now. Ctrl-C passes through; the record then holds complete heats.
    """
    budget = budget or Budget()
    if not warmed:
        warm_up(todo, engines)
    done = 0
    for turn in range(rounds):
        left = [(index, job) for index, job in enumerate(todo) if not record.has(job, turn)]
        if turn and not all(budget.fits(*size) for size in _sizes(left)):
            break
        if left:
            for engine in engines:
                engine.refresh()
        for index, job in left:
            if not budget.fits(_kind(job), len(job.asks)):
                break
            shift = (turn + index) % len(engines)
            timed: dict[str, TimedRun] = {}
            with budget.piece(_kind(job), len(job.asks)):
                for engine in [*engines[shift:], *engines[:shift]]:
                    advance(min(done, 1), f"{job.category}: {engine.name}")
                    timed[engine.name] = answer(engine, job)
                    done += 1
            record.heats.append(Heat(job, turn, {c.name: timed[c.name] for c in engines}))
    advance(min(done, 1), "done")


def _kind(job: BenchJob) -> str:
    return f"requests, {job.concurrency} at once"


def _sizes(left: Sequence[tuple[int, BenchJob]]) -> list[tuple[str, int]]:
    """What a round asks of the budget."""
    kinds = dict.fromkeys(_kind(job) for _, job in left)
    return [(k, sum(len(job.asks) for _, job in left if _kind(job) == k)) for k in kinds]


def in_turn(items: Iterable[Element], key: Callable[[Element], object]) -> list[Element]:
    """One of each kind in turn, so that any beginning of the list has all kinds."""
    kinds: dict[object, list[Element]] = {}
    for item in items:
        kinds.setdefault(key(item), []).append(item)
    return [item for row in zip_longest(*kinds.values()) for item in row if item is not None]


@dataclass(frozen=True)
class Sweep:
    """Every concurrency with every temperature, ``rounds`` times."""

    concurrencies: Sequence[int]
    temperatures: Sequence[float]
    rounds: int
    settings: Settings

    def jobs(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        concurrency: int,
        most_waves: float = float("inf"),
    ) -> list[BenchJob]:
        """Temperatures and categories take turns: a budget may end the list anywhere."""
        planned = chain.from_iterable(
            jobs(prompts, self.settings, concurrency, temperature, most_waves)
            for temperature in self.temperatures
        )
        return in_turn(planned, lambda job: (job.temperature, job.category))

    def wanted(self, prompts: Sequence[tuple[str, Sequence[int]]]) -> int:
        """How many heats a round has."""
        return sum(len(self.jobs(prompts, n)) for n in self.concurrencies)

    def runs(self, prompts: Sequence[tuple[str, Sequence[int]]], methods: Sequence[Method]) -> int:
        """How many timed runs that makes."""
        return self.rounds * sum(
            len(self.jobs(prompts, n)) * len(entered(methods, n)) for n in self.concurrencies
        )

    def run(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        methods: Sequence[Method],
        start: Callable[[Method, int], BenchEngine],
        record: HeatRecord,
        advance: OnHeat = lambda steps, what: None,
        finished: Callable[[int, Sequence[BenchEngine]], None] = lambda clients, all_: None,
        budget: Budget | None = None,
        answer: OnJob = lambda one, job: one.run(job.asks),
    ) -> None:
        """Measure into ``record``. ``start(method, clients)`` makes a engine; those of one
        concurrency live at the same time, and ``finished`` gets them when it is done. Every
        concurrency has the same share of the budget. Raises what ``start`` raises; Ctrl-C passes
        through."""
        budget = budget or Budget()
        record.rounds = max(record.rounds, self.rounds)
        for index, concurrency in enumerate(self.concurrencies):
            share = budget.part(1 / (len(self.concurrencies) - index))
            engines = []
            for method in entered(methods, concurrency):
                advance(0, f"loading {method.name}")
                engines.append(start(method, concurrency))
            todo = self.jobs(prompts, concurrency)
            advance(0, "warming up")
            with share.piece("warming up"):
                warm_up(todo, engines)
            if share.seconds is not None:
                share.reserve = _ENDING * share.left
            if concurrency > 1 and share.seconds is not None:
                todo = self.jobs(prompts, concurrency, self._waves(share))
            take_turns(todo, engines, record.rounds, record, advance, share, True, answer)
            finished(concurrency, engines)

    def _waves(self, budget: Budget) -> float:
        """Requests of each client that fit, by what warming up took."""
        warm = min(_WARM_TOKENS, self.settings.max_tokens)
        wave = (budget.estimate("warming up") or 0.0) * self.settings.max_tokens / warm
        return budget.left / max(wave, 1e-9)


def entered(methods: Sequence[Method], concurrency: int) -> list[Method]:
    """transformers answers one request at a time."""
    return [method for method in methods if concurrency == 1 or not method.alone]

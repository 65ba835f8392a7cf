"""Taking turns: every contestant does every job in every round, in rotating order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from paceline.bench.methods import Method
from paceline.bench.outcome import Ask, Contestant, Outcome
from paceline.core.params import SamplingParams

Advance = Callable[[int, str], None]
EVERYTHING = "all prompts"
_WARM_TOKENS = 16


@dataclass(frozen=True)
class Job:
    """Requests that a contestant answers in one timed run.

    ``index`` tells the jobs of one category, concurrency and temperature apart.
    """

    category: str
    concurrency: int
    temperature: float
    index: int
    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Heat:
    """One job in one round: the outcome of every contestant, by name."""

    job: Job
    turn: int
    outcomes: dict[str, Outcome]


@dataclass
class Record:
    """The heats so far. A heat is recorded when its last contestant is done, so one that was
    interrupted leaves nothing, and in each all contestants had the same machine."""

    heats: list[Heat] = field(default_factory=list)

    def names(self) -> list[str]:
        """Contestants, in the order in which they were entered."""
        return list(dict.fromkeys(name for heat in self.heats for name in heat.outcomes))


@dataclass(frozen=True)
class Settings:
    """How prompts become requests. ``seed``: request i gets ``seed + i``; None draws freely."""

    max_tokens: int
    ignore_eos: bool = True
    seed: int | None = None


def jobs(
    prompts: Iterable[tuple[str, Sequence[int]]],
    settings: Settings,
    concurrency: int,
    temperature: float,
) -> list[Job]:
    """Jobs over prompts, given as (category, token ids).

    One request at a time: a job a prompt. Several: one job over all prompts, repeated in turn
    until every client has sent at least two requests, and all equally many.
    """
    pairs = list(prompts)
    if concurrency == 1:
        numbered = [(number, category, [ids]) for number, (category, ids) in enumerate(pairs)]
    else:
        waves = max(2, -(-len(pairs) // concurrency))
        many = [pairs[n % len(pairs)][1] for n in range(waves * concurrency)]
        numbered = [(0, EVERYTHING, many)]
    return [
        Job(
            category,
            concurrency,
            temperature,
            number,
            tuple(
                Ask(tuple(ids), _params(settings, temperature, number + place))
                for place, ids in enumerate(group)
            ),
        )
        for number, category, group in numbered
    ]


def _params(settings: Settings, temperature: float, number: int) -> SamplingParams:
    seed = None if settings.seed is None else (settings.seed + number) % 2**63
    return SamplingParams(
        temperature=temperature,
        max_tokens=settings.max_tokens,
        ignore_eos=settings.ignore_eos,
        seed=seed if temperature > 0 else None,
    )


def warm_up(todo: Sequence[Job], contestants: Sequence[Contestant]) -> None:
    """A short untimed run of everybody in each shape: buffers, kernels, lazy imports."""
    shapes = {(job.concurrency, job.temperature): job for job in reversed(todo)}
    for job in shapes.values():
        asks = [
            Ask(a.prompt, replace(a.params, max_tokens=min(_WARM_TOKENS, a.params.max_tokens)))
            for a in job.asks[: job.concurrency]
        ]
        for contestant in contestants:
            contestant.run(asks)


def _silent(steps: int, description: str) -> None:
    pass


def _nothing_more(concurrency: int, contestants: Sequence[Contestant]) -> None:
    pass


def take_turns(
    todo: Sequence[Job],
    contestants: Sequence[Contestant],
    rounds: int,
    record: Record,
    advance: Advance = _silent,
) -> None:
    """Let all do every job ``rounds`` times; fills the record heat by heat.

    Within a heat the contestants run one after another, so that all meet the same weather; who
    begins changes from heat to heat. ``advance(1, what)`` is called before every run (0 before
    the first) and at the end, with what runs now. Ctrl-C passes through; the record then holds
    complete heats.
    """
    warm_up(todo, contestants)
    done = 0
    for turn in range(rounds):
        for contestant in contestants:
            contestant.refresh()
        for place, job in enumerate(todo):
            shift = (turn + place) % len(contestants)
            timed: dict[str, Outcome] = {}
            for contestant in [*contestants[shift:], *contestants[:shift]]:
                advance(min(done, 1), f"{job.category}: {contestant.name}")
                timed[contestant.name] = contestant.run(job.asks)
                done += 1
            record.heats.append(Heat(job, turn, {c.name: timed[c.name] for c in contestants}))
    advance(min(done, 1), "done")


@dataclass(frozen=True)
class Sweep:
    """Every concurrency with every temperature, ``rounds`` times."""

    concurrencies: Sequence[int]
    temperatures: Sequence[float]
    rounds: int
    settings: Settings

    def jobs(self, prompts: Sequence[tuple[str, Sequence[int]]], concurrency: int) -> list[Job]:
        return [
            job
            for temperature in self.temperatures
            for job in jobs(prompts, self.settings, concurrency, temperature)
        ]

    def runs(self, prompts: Sequence[tuple[str, Sequence[int]]], methods: Sequence[Method]) -> int:
        """How many timed runs that makes."""
        return self.rounds * sum(
            len(self.jobs(prompts, n)) * len(entered(methods, n)) for n in self.concurrencies
        )

    def run(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        methods: Sequence[Method],
        start: Callable[[Method, int], Contestant],
        record: Record,
        advance: Advance = _silent,
        finished: Callable[[int, Sequence[Contestant]], None] = _nothing_more,
    ) -> None:
        """Measure into ``record``. ``start(method, clients)`` makes a contestant; those of one
        concurrency live at the same time, and ``finished`` gets them when it is done. Raises what
        ``start`` raises; Ctrl-C passes through."""
        for concurrency in self.concurrencies:
            contestants = []
            for method in entered(methods, concurrency):
                advance(0, f"loading {method.name}")
                contestants.append(start(method, concurrency))
            take_turns(self.jobs(prompts, concurrency), contestants, self.rounds, record, advance)
            finished(concurrency, contestants)


def entered(methods: Sequence[Method], concurrency: int) -> list[Method]:
    """transformers answers one request at a time."""
    return [method for method in methods if concurrency == 1 or method.variant is None]

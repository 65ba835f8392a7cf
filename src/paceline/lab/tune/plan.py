"""The whole of tuning: every candidate beside plain decoding, then rounds of the best of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from typing import Any

from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.lab.bench.engines import PLAIN, Paceline, Starter
from paceline.lab.bench.prompts import BenchPrompt, fit, in_turn, tokens_needed
from paceline.lab.bench.runner import (
    Ask,
    BenchJob,
    Heat,
    Length,
    Method,
    merged,
    take_turns,
    warm_up,
)
from paceline.lab.budget import Budget, Spending
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.candidates import DrafterCandidate, default_candidate
from paceline.lab.tune.finalists import (
    LEAST_ROUNDS,
    SIZES,
    Confirmation,
    DrafterTrial,
    Finalist,
    affordable,
    choose,
    confirmations,
    unrest_between,
    winner,
)
from paceline.llm import LLM
from paceline.model.measure import measure_target
from paceline.settings.tuned import KnownCosts, PassCosts, count_parameters

LEAST_BATCH = 8  # of tuned settings: requests that were not expected may join
_TOKENS = (1, 2, 3, 5, 8, 16, 25)  # of each sequence, in forwards of the target alone
_TARGET_SHARE = 0.2  # of the budget, for these
_TRIED_SHARE = 0.65  # of what is left then, for the candidates
_AROUND = 1.7  # times what the two engines decode: loading and warming up


@dataclass
class TuningOutcome:
    """All that was measured so far. ``left_out``: what, and why; ``not_tried``: candidates that had
    no time. ``rounds`` of the confirmation are wanted, of ``size`` prompts each; ``heats`` has
    those done."""

    options: TuneOptions
    model: str
    parameters: int
    prompt_count: int = 0
    costs: KnownCosts | None = None
    trials: list[DrafterTrial] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    finalists: list[Finalist] = field(default_factory=list)
    heats: list[Heat] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    size: int = 0
    completed: Spending | None = None

    @classmethod
    def start(cls, options: TuneOptions, llm: LLM) -> TuningOutcome:
        """Of the target that ``llm`` has loaded."""
        return cls(options, llm.target.name, count_parameters(llm.target))

    @property
    def batch(self) -> int:
        """Sequences that the tuned engine has room for."""
        return max(LEAST_BATCH, self.options.concurrency)

    @property
    def results(self) -> list[Confirmation]:
        """Of the finalists, plain decoding first."""
        return confirmations(self.finalists, self.heats)

    @property
    def chosen(self) -> Confirmation | None:
        """Only once it is confirmed, by two rounds where as many are wanted."""
        wanted = min(LEAST_ROUNDS, self.options.rounds)
        enough = self.heats and len(self.heats) >= wanted
        return winner(self.results) if enough else None

    @property
    def unrest(self) -> float:
        """Slow plain steps by the fastest, from run to run."""
        plain = [trial.plain for trial in self.trials]
        plain += [heat.outcomes[PLAIN] for heat in self.heats]
        return unrest_between([run.decoding for run in plain])


def turns(candidates: Sequence[DrafterCandidate], options: TuneOptions) -> int:
    """About how often ``tune`` reports progress."""
    return 8 + len(candidates) + 6 * options.rounds


def tune(
    llm: LLM,
    candidates: Sequence[DrafterCandidate],
    prompts: Sequence[BenchPrompt],
    outcome: TuningOutcome,
    advance: Callable[[str], None],
    budget: Budget | None = None,
) -> None:
    """Fill ``outcome``. ``llm`` is idle; engines beside it then have the costs measured here.
    ``advance`` is told what comes next. Raises DataError if no prompt leaves room for answers, and
    what a requested candidate raises."""
    run = _Tuning(llm, outcome, advance, budget or Budget(), _encoded(llm, outcome, prompts))
    advance("loading drafters")
    default = next((candidate for candidate in candidates if candidate.default), None)
    ordered = in_turn([c for c in candidates if not c.default], lambda c: c.family)
    for one in {c.spec.partition(",")[0]: c for c in ordered if c.requested}.values():
        run.open(one, 0).close()  # what does not load is said before minutes pass
    try:
        if default is not None:
            default = run.composed(default)
        run.measure_target()
        run.measure_plain()
        run.try_all(ordered)
        run.confirm(default)
    finally:
        done, rounds = len(ordered) - len(outcome.not_tried), f"rounds of {outcome.size} prompts"
        heats = len(outcome.heats)  # more than wanted where all different prompts come again
        outcome.completed = Spending(
            run.budget.seconds,
            run.budget.spent,
            {"drafters": done, rounds: heats},
            {"drafters": len(ordered), rounds: max(outcome.options.rounds, heats)},
            tuple(outcome.not_tried),
        )


def _encoded(llm: LLM, outcome: TuningOutcome, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    """The prompts that leave room for the answers, one of each category in turn, so that any part
    of them has all."""
    ordered = in_turn(prompts, lambda prompt: prompt.category)
    fitting, left_out = fit(ordered, llm, outcome.options.max_tokens)
    outcome.prompt_count = len(fitting)
    outcome.left_out += [(name, "too long for the model") for name in left_out]
    return [tokens for _, tokens in fitting]


def rounds_of(
    prompts: Sequence[list[int]], count: int, size: int, concurrency: int, params: SamplingParams
) -> tuple[list[BenchJob], int]:
    """``count`` rounds of ``size`` prompts, at least of as many as are decoded at once: jobs of
    different prompts, for drafters that remember, and how often all of these are done."""
    size = min(max(size, concurrency), max(concurrency, len(prompts)))
    different = min(count, max(1, len(prompts) // size))
    asks = [Ask(tuple(ids), params) for ids in islice(cycle(prompts), different * size)]
    rounds = [tuple(asks[index * size : (index + 1) * size]) for index in range(different)]
    jobs = [
        BenchJob("confirming", concurrency, params.temperature, index, of_round)
        for index, of_round in enumerate(rounds)
    ]
    return jobs, -(-count // different)


@dataclass
class _Tuning:
    """One run, in which everything has a share of the budget."""

    llm: LLM
    outcome: TuningOutcome
    advance: Callable[[str], None]
    budget: Budget
    prompts: list[list[int]]
    request_seconds: float = 0.0  # a plain request's part of the time

    def __post_init__(self) -> None:
        options = self.outcome.options
        self.params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
        needed = tokens_needed(self.llm, self.prompts, options.max_tokens)
        self.starter = Starter(self.llm, max_model_len=needed)
        # Other prompts than those that the first rounds of the confirmation have.
        self.jobs, _ = rounds_of(self.prompts[::-1], SIZES[0], 1, options.concurrency, self.params)

    def open(
        self, drafter: DrafterCandidate | Finalist, length: Length, batch: int | None = None
    ) -> Paceline:
        """With room for a ``batch``, or for what is decoded. Raises what loading it raises."""
        key = drafter.key if isinstance(drafter, Finalist) else drafter.spec
        method = Method(key, None if drafter.spec == "none" else drafter.spec, length)
        clients = self.outcome.options.concurrency
        engine = self.starter.open(method, clients, max_batch_size=batch or clients)
        assert isinstance(engine, Paceline)
        return engine

    @cached_property
    def plain(self) -> Paceline:
        return self.open(Finalist(PLAIN, "none", 0), 0, self.outcome.batch)

    def loaded(self, candidate: DrafterCandidate, length: Length) -> Paceline | None:
        """As in the tuned engine, whose costs are measured; None, and left out, if it does not
        load. Raises PacelineError if it was requested."""
        try:
            return self.open(candidate, length, self.outcome.batch)
        except PacelineError as error:
            if candidate.requested:
                raise
            self.outcome.left_out.append((candidate.label, str(error)))
            return None

    def composed(self, default: DrafterCandidate) -> DrafterCandidate | None:
        """What the default draft is for this target; None if it does not load."""
        engine = self.loaded(default, 0)
        if engine is None:
            return None
        engine.close()
        spec = engine.llm.drafts[0]
        return default if spec == default.spec else default_candidate(spec)

    def measure_target(self) -> None:
        """Costs of chains, for each batch size that there is time for. All engines have them."""
        budget, batch = self.budget.part(_TARGET_SHARE), self.outcome.batch

        def begin(size: int) -> AbstractContextManager[Any] | None:
            if not budget.fits("rows", size):
                return None
            self.advance(f"measuring the target: {size} at once")
            return budget.task("rows", size)

        sizes = sorted({batch, *(1 << power for power in range(batch.bit_length()))})
        counts = dict.fromkeys(sizes, _TOKENS)
        target, cache = self.llm.target, self.plain.llm.engine.cache
        costs = measure_target(target, cache, counts, rounds=2, begin=begin)
        self.outcome.costs = self.llm.known_costs = KnownCosts(
            batches=costs.batches,
            tokens=costs.curves[0].tokens,
            target=tuple(curve.seconds for curve in costs.curves),
            passes={},
        )

    def measure_plain(self) -> None:
        """How long a request takes without drafts, once that is warm."""
        self.advance("measuring plain decoding")
        warm_up(self.jobs[:1], [self.plain])
        asks = self.jobs[0].asks
        self.request_seconds = self.plain.run(asks).seconds / len(asks)

    def try_all(self, candidates: Sequence[DrafterCandidate]) -> None:
        """Each whole or not at all, on as many prompts as let all be tried in their share of the
        time."""
        share, size = self.budget.part(_TRIED_SHARE), len(self.jobs[0].asks)
        one = _AROUND * 2 * size * self.request_seconds * max(1, len(candidates))
        jobs = self.jobs[: max(1, int(min(share.left / one, len(self.jobs))))]
        for candidate in candidates:
            if not share.fits("candidate"):
                self.outcome.not_tried.append(candidate.label)
                continue
            self.advance(f"trying {candidate.label}")
            with self.budget.task("candidate"):
                self._try(candidate, jobs)

    def _try(self, candidate: DrafterCandidate, jobs: Sequence[BenchJob]) -> None:
        engine = self.loaded(candidate, "auto")
        if engine is None:
            return
        heats = list[Heat]()
        try:
            warm_up(jobs[:1], [engine])
            take_turns(jobs, [self.plain, engine], 1, heats)
            passes = _passes_of(engine.llm)
        finally:
            engine.close()
        plain, run = (
            merged([heat.outcomes[name] for heat in heats]) for name in (PLAIN, engine.name)
        )
        if run.counts.drafted:
            self.outcome.trials.append(DrafterTrial(candidate, run, plain, passes))
        else:
            self.outcome.left_out.append((candidate.label, "it drafted nothing for these prompts"))

    def confirm(self, default: DrafterCandidate | None) -> None:
        """Rounds of the best settings, in turns, as many as the budget lets them have."""
        outcome, options = self.outcome, self.outcome.options
        finalists = choose(outcome.trials, default)
        outcome.finalists, outcome.size = affordable(
            finalists, self.request_seconds, options, self.budget
        )
        jobs, repeats = rounds_of(
            self.prompts, options.rounds, outcome.size, options.concurrency, self.params
        )
        engines = [self.plain, *(self.open(one, one.length) for one in outcome.finalists[1:])]
        warm_up(jobs[:1], engines[1:])
        take_turns(jobs, engines, repeats, outcome.heats, self.advance, self.budget)
        for engine in engines:
            engine.close()


def _passes_of(llm: LLM) -> dict[str, PassCosts]:
    """As the engine measured them when it was made; none where its controller has no costs."""
    cost = getattr(llm.engine.controller, "cost", None)
    known = {} if cost is None else cost.drafters
    curves = {str(name): costs.seconds for name, costs in known.items() if not costs.costless}
    return {name: PassCosts(curve.tokens, curve.seconds) for name, curve in curves.items()}

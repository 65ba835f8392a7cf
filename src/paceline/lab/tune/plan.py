"""The tuning run: measures every candidate in turns with plain decoding, then confirms the best of
them in further rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice

from paceline.build import measure_costs
from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.lab.bench import runner
from paceline.lab.bench.engines import EngineFactory, Paceline
from paceline.lab.bench.prompts import BenchPrompt, fit, interleave, tokens_needed
from paceline.lab.budget import Budget, Spending
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.candidates import (
    MIN_ROUNDS,
    PLAIN_CANDIDATE,
    ROUND_SIZES,
    Confirmation,
    DrafterCandidate,
    DrafterTrial,
    choose,
    confirmations,
    default_candidate,
    round_size,
    winner,
)
from paceline.llm import LLM

# Smallest batch size of the tuned settings: more requests may arrive than were expected.
MIN_BATCH_SIZE = 8
_TRIED_SHARE = 0.65  # of the budget, for the candidates
_OVERHEAD = 1.7  # time of a trial or round, with loading and warming up, by that of decoding


@dataclass
class TuningOutcome:
    """All measurements so far. ``left_out``: (name, reason) of candidates and prompts that cannot
    be used; ``not_tried``: candidates for which there was no time. ``size``: prompts per round of
    the confirmation; ``job_results``: its completed rounds."""

    options: TuneOptions
    model: str
    prompt_count: int = 0
    trials: list[DrafterTrial] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    finalists: list[DrafterCandidate] = field(default_factory=list)
    job_results: list[runner.JobResult] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    size: int = 0
    completed: Spending | None = None

    @property
    def batch(self) -> int:
        return max(MIN_BATCH_SIZE, self.options.concurrency)

    @property
    def results(self) -> list[Confirmation]:
        """The results of the finalists, plain decoding first."""
        return confirmations(self.finalists, self.job_results)

    @property
    def chosen(self) -> Confirmation | None:
        """The winner, once enough rounds are done: two, or one if only one is wanted."""
        wanted = min(MIN_ROUNDS, self.options.rounds)
        return winner(self.results) if len(self.job_results) >= wanted else None


def num_tasks(candidates: Sequence[DrafterCandidate], options: TuneOptions) -> int:
    """Roughly how often ``tune`` calls ``advance``, for a progress bar."""
    return 3 + len(candidates) + 4 * options.rounds


def tune(
    llm: LLM,
    candidates: Sequence[DrafterCandidate],
    prompts: Sequence[BenchPrompt],
    outcome: TuningOutcome,
    advance: Callable[[str], None],
    budget: Budget | None = None,
    kv_cache_memory: int | None = None,
) -> None:
    """Measure, and fill ``outcome``. ``llm`` must be idle; engines that share its target use the
    costs measured here. ``advance(description)`` is called before each task. ``kv_cache_memory``:
    of each measured engine, in bytes. Raises DataError if no prompt leaves room for answers, and
    what loading a requested candidate raises."""
    # One of each category in turn, so that any part of them has all.
    ordered = interleave(prompts, lambda prompt: prompt.category)
    fitting, left_out = fit(ordered, llm, outcome.options.max_tokens)
    outcome.prompt_count = len(fitting)
    outcome.left_out += [(name, "too long for the model") for name in left_out]
    texts = [tokens for _, tokens in fitting]
    run = _Tuning(llm, outcome, advance, budget or Budget(), texts, kv_cache_memory)
    advance("loading drafters")
    default = next((candidate for candidate in candidates if candidate.default), None)
    tried = interleave([c for c in candidates if not c.default], lambda c: c.family)
    for requested in {c.spec.partition(",")[0]: c for c in tried if c.requested}.values():
        run.open(requested, 0).llm.close()  # fail early, before minutes of measuring
    try:
        if default is not None:
            default = run.resolve_default(default)
        run.measure_target()
        run.measure_plain()
        run.try_all(tried)
        run.confirm(default)
    finally:
        done, rounds = len(tried) - len(outcome.not_tried), f"rounds of {outcome.size} prompts"
        # More than wanted if rounds were added so that all prompts are used equally often.
        done_rounds = len(outcome.job_results)
        outcome.completed = Spending(
            run.budget.seconds,
            run.budget.spent,
            {"drafters": done, rounds: done_rounds},
            {"drafters": len(tried), rounds: max(outcome.options.rounds, done_rounds)},
            tuple(outcome.not_tried),
        )


def rounds_of(
    prompts: Sequence[list[int]], count: int, size: int, concurrency: int, params: SamplingParams
) -> tuple[list[runner.BenchJob], int]:
    """Jobs for ``count`` rounds of ``size`` prompts (at least ``concurrency``), and how often to
    repeat all of them. The jobs have different prompts, as far as there are enough, because some
    drafters learn from earlier requests."""
    size = min(max(size, concurrency), max(concurrency, len(prompts)))
    different = min(count, max(1, len(prompts) // size))
    requests = (runner.BenchRequest(tuple(ids), params) for ids in cycle(prompts))
    what = "confirming", concurrency, params.temperature
    numbers = range(different)
    jobs = [runner.BenchJob(*what, number, tuple(islice(requests, size))) for number in numbers]
    return jobs, -(-count // different)


@dataclass
class _Tuning:
    """One tuning run; each stage has a share of the budget."""

    llm: LLM
    outcome: TuningOutcome
    advance: Callable[[str], None]
    budget: Budget
    prompts: list[list[int]]
    kv_cache_memory: int | None
    request_seconds: float = 0.0  # wall time per plain request

    def __post_init__(self) -> None:
        options = self.outcome.options
        self.params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
        needed = tokens_needed(self.llm, self.prompts, options.max_tokens)
        sizes = {"max_model_len": needed, "kv_cache_memory": self.kv_cache_memory}
        self.factory = EngineFactory(self.llm, **sizes)
        # From the end, so that the first rounds of the confirmation have other prompts.
        jobs = self.prompts[::-1], ROUND_SIZES[0], 1, options.concurrency, self.params
        self.jobs, _ = rounds_of(*jobs)

    def open(self, candidate: DrafterCandidate, length: runner.Length = "auto") -> Paceline:
        """An engine with the batch size of the tuned one. Raises what loading raises."""
        method = runner.Method(candidate.spec, candidate.spec, length)
        clients = self.outcome.options.concurrency
        return self.factory.create(method, clients, max_batch_size=self.outcome.batch)

    @cached_property
    def plain(self) -> Paceline:
        return self.open(PLAIN_CANDIDATE, 0)

    def load(self, candidate: DrafterCandidate, length: runner.Length = "auto") -> Paceline | None:
        """An engine. A candidate that fails to load is left out (None), unless it was requested:
        then PacelineError is raised."""
        try:
            return self.open(candidate, length)
        except PacelineError as error:
            if candidate.requested:
                raise
            self.outcome.left_out.append((candidate.label, str(error)))
            return None

    def resolve_default(self, default: DrafterCandidate) -> DrafterCandidate | None:
        """The drafters that the default draft stands for with this target, if they load."""
        engine = self.load(default, 0)
        if engine is None:
            return None
        engine.llm.close()
        spec = engine.llm.drafts[0]
        return default if spec == default.spec else default_candidate(spec)

    def measure_target(self) -> None:
        """Measure the target's forwards, whose costs all engines use."""
        self.advance("measuring the target")
        cache = self.plain.llm.engine.cache
        self.llm.target_costs = measure_costs(self.llm.target, cache, self.outcome.batch)

    def measure_plain(self) -> None:
        """Measure how long a request takes without drafts, after a warm-up."""
        self.advance("measuring plain decoding")
        runner.warm_up(self.jobs[:1], [self.plain])
        requests = self.jobs[0].requests
        self.request_seconds = self.plain.run(requests).seconds / len(requests)

    def try_all(self, candidates: Sequence[DrafterCandidate]) -> None:
        """Try each candidate on as many prompts as allow all of them to be tried in their share of
        the budget. A candidate that does not fit any more is not tried."""
        share, size = self.budget.part(_TRIED_SHARE), len(self.jobs[0].requests)
        job_seconds = _OVERHEAD * 2 * size * self.request_seconds * max(1, len(candidates))
        jobs = self.jobs[: max(1, int(min(share.left / job_seconds, len(self.jobs))))]
        for candidate in candidates:
            if share.left <= 0:
                self.outcome.not_tried.append(candidate.label)
                continue
            self.advance(f"trying {candidate.label}")
            self._try(candidate, jobs)

    def _try(self, candidate: DrafterCandidate, jobs: Sequence[runner.BenchJob]) -> None:
        engine = self.load(candidate)
        if engine is None:
            return
        record = list[runner.JobResult]()
        try:
            runner.warm_up(jobs[:1], [engine])
            runner.take_turns(jobs, [self.plain, engine], 1, record)
        finally:
            engine.llm.close()
        names = engine.name, self.plain.name
        run, plain = (runner.merged([r.runs[name] for r in record]) for name in names)
        if run.counts.drafted:
            self.outcome.trials.append(DrafterTrial(candidate, run, plain))
        else:
            self.outcome.left_out.append((candidate.label, "it drafted nothing for these prompts"))

    def confirm(self, default: DrafterCandidate | None) -> None:
        """Let the finalists take turns for as many rounds as the budget allows."""
        outcome, options = self.outcome, self.outcome.options
        outcome.finalists = choose(outcome.trials, default)
        count, seconds = len(outcome.finalists), _OVERHEAD * self.request_seconds
        outcome.size = round_size(count, seconds, options, self.budget)
        engines = [self.plain]
        try:
            if self.budget.left <= 0:
                return
            size = outcome.size, options.concurrency
            jobs, repeats = rounds_of(self.prompts, options.rounds, *size, self.params)
            engines += map(self.open, outcome.finalists[1:])
            runner.warm_up(jobs[:1], engines[1:])
            record = outcome.job_results
            runner.take_turns(jobs, engines, repeats, record, self.advance, self.budget)
        finally:
            for engine in engines:
                engine.llm.close()

"""Real decoding of the best settings beside plain decoding, in turns (lab/bench/runner.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from statistics import median

from paceline.core.costs import TargetCosts
from paceline.core.params import SamplingParams
from paceline.lab.bench.methods import Length, Method, Starter
from paceline.lab.bench.runner import take_turns, warm_up
from paceline.lab.bench.runs import Ask, BenchEngine, BenchJob, HeatRecord, TimedRun, merged
from paceline.lab.budget import Budget
from paceline.lab.tune.measure import TuneOptions
from paceline.lab.tune.search import MARGIN, MeasuredMethod, predicted_by_measured
from paceline.llm import LLM

AUTO_MARGIN = 1.03  # by which a fixed length must beat the adaptive one, which follows the load
PLAIN = "none"
FEW = 3  # finalists at least: plain decoding, and the best drafter at both lengths
LEAST_ROUNDS = 2
_SIZES = (8, 4, 2, 1)  # prompts of a round
_SLOWER = 1.15  # whole steps than the target's forwards in them


@dataclass(frozen=True)
class Finalist:
    """A drafter at a ``length``, fixed or "auto", which is then at most ``max_length``.
    ``predicted``: speed by plain decoding's, of "auto" and hybrids that of the best fixed length
    and member; None where none was measured. ``default``: what commands take unasked."""

    label: str
    spec: str
    length: Length
    max_length: int
    predicted: float | None = 1.0
    methods: tuple[MeasuredMethod, ...] = ()
    default: bool = False

    @property
    def name(self) -> str:
        return "plain" if self.spec == PLAIN else f"{self.label}, length {self.length}"

    @property
    def key(self) -> str:
        """In the record of heats: labels may be the same."""
        return "plain" if self.spec == PLAIN else f"{self.spec}, length {self.length}"


@dataclass(frozen=True)
class Confirmation:
    """What a finalist took in all rounds; a ratio is its rate by plain's in that round.
    ``plain_rate``: of plain decoding once the prompts are read."""

    finalist: Finalist
    run: TimedRun
    ratios: tuple[float, ...]
    plain_rate: float = 0.0

    @property
    def speedup(self) -> float:
        return median(self.ratios) if self.ratios else 0.0

    @property
    def decoding_speedup(self) -> float:
        """Once the prompts are read: what the model predicts."""
        return self.run.decoding.rate / self.plain_rate if self.plain_rate else 0.0

    @property
    def predicted_by_measured(self) -> float | None:
        predicted = self.finalist.predicted
        return predicted and predicted_by_measured(predicted, self.decoding_speedup)


def confirmations(finalists: Sequence[Finalist], record: HeatRecord) -> list[Confirmation]:
    """Of each finalist, plain decoding being the first of them."""
    runs = [[heat.outcomes[finalist.key] for heat in record.heats] for finalist in finalists]
    ratios = [[a.rate / b.rate for a, b in zip(of, runs[0], strict=True)] for of in runs]
    return [
        Confirmation(finalist, merged(of), tuple(by_plain), merged(runs[0]).decoding.rate)
        for finalist, of, by_plain in zip(finalists, runs, ratios, strict=True)
    ]


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


def confirm(
    llm: LLM,
    finalists: Sequence[Finalist],
    jobs: Sequence[BenchJob],
    turns: int,
    record: HeatRecord,
    advance: Callable[[str], None],
    budget: Budget,
) -> None:
    """All do the jobs in turn, as often as the budget lets them; fills ``record``."""
    engines, clients = list[BenchEngine](), jobs[0].concurrency
    for finalist in finalists:
        spec = None if finalist.spec == PLAIN else finalist.spec
        method = Method(finalist.key, spec, finalist.length)
        engines.append(Starter(llm, max_draft_length=finalist.max_length).open(method, clients))
    halves = [Ask(a.prompt[: max(1, len(a.prompt) // 2)], a.params) for a in jobs[0].asks[:1]]
    warm_up([BenchJob("", 1, jobs[0].temperature, 0, tuple(halves))], engines)
    take_turns(jobs, engines, turns, record, advance, budget)
    for engine in engines:
        engine.close()


def winner(results: Sequence[Confirmation]) -> Confirmation:
    """The fastest by median that drafted; plain decoding unless it is beaten clearly. Preferred if
    hardly slower: the default draft, which has what other text may need, then the adaptive length
    of the same drafter."""
    plain = results[0]
    drafting = [result for result in results[1:] if result.run.counts.drafted]
    best = max(drafting, key=lambda result: result.speedup, default=plain)
    if best is plain or best.speedup < MARGIN:
        return plain

    def preference(result: Confirmation) -> tuple[bool, bool, float]:
        finalist = result.finalist
        adapts = (finalist.spec, finalist.length) == (best.finalist.spec, "auto")
        return finalist.default, adapts, result.speedup

    near = [result for result in drafting if result.speedup * AUTO_MARGIN >= best.speedup]
    return max(near, key=preference)


def affordable(
    finalists: list[Finalist], target: TargetCosts, options: TuneOptions, budget: Budget
) -> tuple[list[Finalist], int]:
    """The finalists that are confirmed, the first few at least, and on how many prompts a round:
    two rounds must fit."""
    few = min(len(finalists), FEW + any(finalist.default for finalist in finalists))
    concurrency, rounds = options.concurrency, min(LEAST_ROUNDS, options.rounds)
    sizes = [max(_SIZES[0], concurrency), *(size for size in _SIZES[1:] if size >= concurrency)]
    step = target(concurrency, 1) * _SLOWER * options.max_tokens
    for many, size in product(dict.fromkeys((len(finalists), few)), sizes):
        seconds = many * -(-size // concurrency) * step * rounds
        if budget.seconds is None or seconds <= budget.left:
            return finalists[:many], size
    return finalists[:few], sizes[-1]

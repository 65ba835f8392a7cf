"""Real decoding of the best settings beside plain decoding, in turns (lab/bench/runner.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from paceline.core.costs import TargetCosts
from paceline.core.params import SamplingParams
from paceline.lab.bench.engines import Paceline
from paceline.lab.bench.methods import Length, Method
from paceline.lab.bench.runner import take_turns, warm_up
from paceline.lab.bench.runs import Ask, BenchJob, HeatRecord, TimedRun, merged
from paceline.lab.budget import Budget
from paceline.lab.prediction import predicted_by_measured
from paceline.lab.tune.measure import TuneOptions
from paceline.lab.tune.search import MARGIN, MeasuredMethod
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

    ``predicted``: speed by plain decoding's; of the adaptive length and of a hybrid that of the
    best fixed length and member, which they should reach; None where none was measured.
    ``methods``: the measured drafters. ``default``: what commands take unasked.
    """

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
        return f"{self.spec}@{self.length}"


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

    @property
    def drafted(self) -> int:
        """0: it was plain decoding under another name."""
        return self.run.drafted or 0


def confirmations(finalists: Sequence[Finalist], record: HeatRecord) -> list[Confirmation]:
    """Of each finalist, plain decoding being the first of them."""
    rounds = [[heat.outcomes[finalist.key] for finalist in finalists] for heat in record.heats]
    whole = [merged([runs[index] for runs in rounds]) for index in range(len(finalists))]
    ratios = [tuple(runs[i].rate / runs[0].rate for runs in rounds) for i in range(len(finalists))]
    return [
        Confirmation(*of_finalist, whole[0].decoding.rate)
        for of_finalist in zip(finalists, whole, ratios, strict=True)
    ]


def rounds_of(
    prompts: Sequence[list[int]], count: int, size: int, concurrency: int, params: SamplingParams
) -> tuple[list[BenchJob], int]:
    """``count`` rounds of ``size`` prompts, of as many as are decoded at once at least.

    As jobs of different prompts, and how often all of these are done: some drafters remember what
    they have seen, so prompts come again only where there are too few, and everyone of those
    begins anew then.
    """
    size = min(max(size, concurrency), max(concurrency, len(prompts)))
    different = min(count, max(1, len(prompts) // size))
    jobs = []
    for index in range(different):
        chosen = [prompts[(index * size + n) % len(prompts)] for n in range(size)]
        asks = tuple(Ask(tuple(ids), params) for ids in chosen)
        jobs.append(BenchJob("confirming", concurrency, params.temperature, index, asks))
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
    """All do the jobs in turn; fills ``record``. A round counts once all have run in it; what was
    measured until an interruption, or until no further round fits, stays."""
    engines = []
    for finalist in finalists:
        spec = None if finalist.spec == PLAIN else finalist.spec
        build = partial(
            llm.beside,
            finalist.spec,
            max_batch_size=jobs[0].concurrency,
            draft_length=finalist.length,
            max_draft_length=finalist.max_length,
            prefix_sharing=False,  # every round pays for its prompts
            seed=0,
        )
        method = Method(finalist.key, spec, finalist.length)
        engines.append(Paceline(method, build, jobs[0].concurrency))
    halves = [Ask(a.prompt[: max(1, len(a.prompt) // 2)], a.params) for a in jobs[0].asks[:1]]
    warm_up([BenchJob("", 1, jobs[0].temperature, 0, tuple(halves))], engines)
    names = {finalist.key: finalist.name for finalist in finalists}

    def show(what: str) -> None:
        advance(f"confirming: {names[what.partition(': ')[2]]}")

    take_turns(jobs, engines, turns, record, show, budget)
    for engine in engines:
        engine.llm.close()


def winner(results: Sequence[Confirmation]) -> Confirmation:
    """The fastest by median; plain decoding unless it is beaten clearly.

    The adaptive length is preferred where a fixed one of the same drafter is hardly faster, and the
    default draft where another is: it has what other text may need. A finalist that never drafted
    cannot win.
    """
    plain = results[0]
    drafting = [result for result in results[1:] if result.drafted]
    best = max(drafting, key=lambda result: result.speedup, default=plain)
    if best is plain or best.speedup < MARGIN:
        return plain

    def preference(result: Confirmation) -> int:
        finalist = result.finalist
        is_adaptive = finalist.spec == best.finalist.spec and finalist.length == "auto"
        return 2 if finalist.default else int(is_adaptive)

    near = [result for result in drafting if result.speedup * AUTO_MARGIN >= best.speedup]
    preferred = max(near, key=preference)
    return preferred if preference(preferred) else best


def affordable(
    finalists: int, target: TargetCosts, options: TuneOptions, budget: Budget, few: int = FEW
) -> tuple[int, int]:
    """How many finalists are confirmed, ``few`` at least, and on how many prompts a round, so that
    two rounds fit at least."""
    concurrency = options.concurrency
    largest = max(_SIZES[0], concurrency)
    if budget.seconds is None:
        return finalists, largest
    sizes = [size for size in (largest, *_SIZES[1:]) if size >= concurrency]
    for many in dict.fromkeys((finalists, min(finalists, few))):
        for size in sizes:
            steps = -(-size // concurrency) * options.max_tokens
            round_seconds = many * steps * target(concurrency, 1) * _SLOWER
            if round_seconds * min(LEAST_ROUNDS, options.rounds) <= budget.left:
                return many, size
    return min(finalists, few), sizes[-1]

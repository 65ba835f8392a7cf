"""What the search needs, measured once: cost curves, acceptance, and what surrounds them; and real
decoding of the best settings beside plain decoding, in turns (lab/bench/runner.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from statistics import median

from paceline.core.costs import DrafterCosts, TargetCosts
from paceline.core.params import SamplingParams
from paceline.engine.driver import Drive, DrivenStep, StepSums, sequence
from paceline.errors import DataError
from paceline.lab.bench.engines import Starter
from paceline.lab.bench.runner import (
    Ask,
    BenchEngine,
    BenchJob,
    Heat,
    Length,
    Method,
    TimedRun,
    merged,
    take_turns,
    warm_up,
)
from paceline.lab.budget import Budget
from paceline.lab.tune import TuneOptions
from paceline.lab.tune.search import MARGIN, DrafterCandidate, MeasuredMethod
from paceline.llm import LLM
from paceline.model.measure import measure

LONGEST = 12  # levels tried where a level takes a pass; twice as many where it takes none
_SHORT = 2  # levels of short drafts, from which the cost of a draft besides its passes follows
_BRIEF = 24  # tokens of answers that only time is taken of

Between = Callable[[], object]

CANDIDATE_SHARE = 0.65  # of what is left, for the drafters
_AROUND = 1.7  # short drafts, warm-ups and plain steps beside those of the sample


@dataclass(frozen=True)
class Sample:
    """Prompts that drafters decode ``alone``, and ``wide`` at once."""

    alone: list[list[int]]
    together: list[list[int]]
    wide: int
    max_tokens: int
    temperature: float

    def params(self, length: int | None = None) -> SamplingParams:
        """Greedy, or sampled as users mostly do: without a seed."""
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, draft_length=length
        )

    def brief(self) -> Sample:
        """Fewer and shorter answers."""
        short = min(self.max_tokens, _BRIEF)
        return replace(self, together=self.together[: self.wide], max_tokens=short)


def fitting_sample(sample: Sample, target: TargetCosts, budget: Budget, candidates: int) -> Sample:
    """As many prompts as let all candidates be measured in their share of the budget."""
    if budget.seconds is None:
        return sample
    limit = max(0.0, budget.left) * CANDIDATE_SHARE / max(1, candidates + 1)  # plain decoding, too
    wide = sample.wide
    for alone, together in ((4, 2 * wide), (4, wide), (2, wide), (2, 0), (1, 0)):
        smaller = replace(sample, alone=sample.alone[:alone], together=sample.together[:together])
        # Long drafts that are seldom accepted.
        waves = -(-together // wide)
        steps = alone * target(1, 1 + LONGEST) + waves * target(wide, 1 + LONGEST)
        if _AROUND * sample.max_tokens * steps <= limit:
            break
    return smaller


@dataclass(frozen=True)
class Run:
    """Prompts decoded ``batch`` at a time: ``steps`` that decoded only, how drafts fared in all
    (``levels``), and what was written."""

    batch: int
    steps: list[StepSums]
    levels: StepSums
    outputs: list[list[int]]


def decode(
    llm: LLM,
    prompts: Sequence[list[int]],
    batch: int,
    params: SamplingParams,
    longest: int = 0,
    between: Between = lambda: None,
) -> Run:
    """Decode all prompts, with room for drafts of ``longest`` levels to the last token. ``between``
    is called after every step and may raise. Raises PacelineError if a request fails."""
    stops = frozenset[int]() if params.ignore_eos else llm.end_tokens
    roomy = replace(params, max_tokens=params.max_tokens + longest)
    drive = Drive(llm.engine, [sequence(ids, roomy, stops) for ids in prompts], batch)

    def after_step() -> None:
        between()
        for seq in [*drive.running.values()]:
            if seq.generated >= params.max_tokens:
                drive.drop(seq.seq_id)

    drive.run(after_step)
    steps = [StepSums.of([step]) for step in drive.steps if step.decodes]
    going = ([c for c in s.commits if c.tokens and not c.finish_reason] for s in drive.steps)
    levels = StepSums.of(DrivenStep(commits, 0.0) for commits in going)
    outputs = [seq.tokens[seq.prompt_length :][: params.max_tokens] for seq in drive.seqs]
    return Run(batch, steps, levels, outputs)


def _runs(llm: LLM, sample: Sample, length: int, between: Between = lambda: None) -> list[Run]:
    """One sequence at a time, and many together."""
    how = sample.params(length), length, between
    groups = ((sample.alone, 1), (sample.together, sample.wide))
    return [decode(llm, prompts, batch, *how) for prompts, batch in groups]


def measure_plain(
    llm: LLM, target: TargetCosts, sample: Sample
) -> tuple[MeasuredMethod, list[Run]]:
    """Plain decoding as a method without drafts, and its runs. Raises DataError."""
    runs = _runs(llm, sample, 0)
    steps = tuple((0, step) for step in _typical_pair(runs, target))
    return MeasuredMethod("plain", "none", "none", steps=steps), runs


def measure_method(
    llm: LLM,
    candidate: DrafterCandidate,
    target: TargetCosts,
    plain: MeasuredMethod,
    sample: Sample,
    between: Between = lambda: None,
) -> MeasuredMethod:
    """Acceptance and costs of the idle drafter of ``llm``. DataError, and ``between``'s errors."""
    drafter = llm.engine.drafter
    timed = measure(drafter.warm_up, list(target.batches), llm.target.device)
    costs = DrafterCosts.of(drafter, LONGEST, timed)
    # Of an answer that takes one step nothing is learnt.
    longest = max(1, min(costs.longest, sample.max_tokens // 3))
    runs = _runs(llm, sample, longest, between)
    levels = sum((run.levels for run in runs), StepSums())
    fill = levels.drafted / max(1, levels.sequences * costs.nodes[longest])
    steps = [(longest, step) for step in _typical_pair(runs, target)]
    few, end, passes = min(_SHORT, longest), longest + 1, costs.passes[: longest + 1]
    if passes[longest] > passes[few]:
        short = _typical_pair(_runs(llm, sample.brief(), few, between), target)
        steps += [(few, step) for step in short]
    drift = _drift(llm, sample, target, plain)
    return MeasuredMethod(
        **vars(candidate),
        levels=levels,
        costs=DrafterCosts(tuple(fill * most for most in costs.nodes[:end]), passes, timed),
        steps=(*plain.steps, *((length, _scaled(step, 1 / drift)) for length, step in steps)),
    )


def _drift(llm: LLM, sample: Sample, target: TargetCosts, plain: MeasuredMethod) -> float:
    """How much slower plain steps are than when plain decoding was measured."""
    now = _typical(decode(llm, sample.alone[:2], 1, sample.brief().params(0)), target)
    if now is None:
        return 1.0
    then = next(step for _, step in plain.steps if step.sequences == step.steps)
    return min(max(now.mean_seconds("target") / then.mean_seconds("target"), 0.5), 3.0)


def _scaled(steps: StepSums, factor: float) -> StepSums:
    """With all times so many times as long."""
    return replace(steps, seconds={phase: factor * s for phase, s in steps.seconds.items()})


def _typical_pair(runs: Sequence[Run], target: TargetCosts) -> list[StepSums]:
    """Typical steps of both runs; one stands for the other if that never had a full batch."""
    steps = [_typical(run, target) for run in runs]
    first = next((step for step in steps if step is not None), None)
    if first is None:
        raise DataError(
            "the answers are too short to measure decoding on; give other prompts or a larger "
            "--max-tokens"
        )
    return [step or first for step in steps]


def _typical(run: Run, target: TargetCosts) -> StepSums | None:
    """The faster three quarters of full batches' steps, by the target's forward against its due."""
    chosen = [step for step in run.steps if step.sequences == run.batch]
    chosen.sort(key=lambda s: s.seconds["target"] / target(run.batch, 1 + s.drafted / run.batch))
    return sum(chosen[1 : -(-3 * len(chosen) // 4)], chosen[0]) if chosen else None


AUTO_MARGIN = 1.03  # by which a fixed length must beat the adaptive one, which follows the load
PLAIN = "none"
FEW = 3  # finalists at least: plain decoding, and the best drafter at both lengths
LEAST_ROUNDS = 2
_MORE = 2  # times the rounds wanted, at most, where they disagree
_MOST_OF = 0.75  # of the rounds in which the faster of two must be so
CALM = 1.5  # slow by fast beyond which figures are worth little
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
    """What a finalist took in all rounds; a ratio is its rate by plain's in that round, of
    ``decoding_ratios`` once the prompts are read. ``rates``: tokens a second by round."""

    finalist: Finalist
    run: TimedRun
    ratios: tuple[float, ...]
    decoding_ratios: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Median, as the speedups are: one slow round moves none of them."""
        return median(self.rates) if self.rates else 0.0

    @property
    def speedup(self) -> float:
        return median(self.ratios) if self.ratios else 0.0

    @property
    def decoding_speedup(self) -> float:
        """Once the prompts are read: what the model predicts."""
        return median(self.decoding_ratios) if self.decoding_ratios else 0.0

    @property
    def predicted_by_measured(self) -> float | None:
        """How many times what was measured was predicted; 1.1 promises 10 % too much."""
        predicted, speedup = self.finalist.predicted, self.decoding_speedup
        return predicted and (predicted / speedup if speedup else 0.0)


def confirmations(finalists: Sequence[Finalist], record: list[Heat]) -> list[Confirmation]:
    """Of each finalist, plain decoding being the first of them."""
    plain, results = [heat.outcomes["plain"] for heat in record], []
    for finalist in finalists:
        runs = [heat.outcomes[finalist.key] for heat in record]
        ratios = tuple(a.rate / b.rate for a, b in zip(runs, plain, strict=True))
        steps = [(a.decoding.rate, b.decoding.rate) for a, b in zip(runs, plain, strict=True)]
        decoding = tuple(a / b for a, b in steps if b)
        rates = tuple(run.rate for run in runs)
        results.append(Confirmation(finalist, merged(runs), ratios, decoding, rates))
    return results


def unrest_between(record: list[Heat]) -> float:
    """Plain decoding's steps in the slowest round, by those in the fastest."""
    rates = [heat.outcomes["plain"].decoding.rate for heat in record]
    slowest = min(rates, default=0.0)
    return max(rates) / slowest if slowest else 1.0


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
    starter: Starter,
    finalists: Sequence[Finalist],
    jobs: Sequence[BenchJob],
    turns: int,
    record: list[Heat],
    advance: Callable[[str], None],
    budget: Budget,
) -> None:
    """All do the jobs in turn, as often as the budget lets them, and again where rounds disagree
    on who wins or by how much; fills ``record``."""
    engines, clients = list[BenchEngine](), jobs[0].concurrency
    for finalist in finalists:
        spec = None if finalist.spec == PLAIN else finalist.spec
        method = Method(finalist.key, spec, finalist.length)
        engines.append(starter.open(method, clients, max_draft_length=finalist.max_length))
    warm_up(jobs[:1], engines)
    take_turns(jobs, engines, turns, record, advance, budget)
    for _ in range((_MORE - 1) * turns):
        done = len(record)
        if done and agrees(confirmations(finalists, record)):
            break
        take_turns(jobs, engines, 1, record, advance, budget)
        if len(record) == done:
            break  # there was no time
    for engine in engines:
        engine.close()


def winner(results: Sequence[Confirmation]) -> Confirmation:
    """The fastest by median that drafted; plain decoding unless it is beaten clearly and in most
    rounds. Preferred if hardly slower: the default draft, which has what other text may need, also
    where rounds disagree on which of both is faster; then that drafter's adaptive length."""
    plain = results[0]
    drafted = [result for result in results[1:] if result.run.counts.drafted]
    drafting = [result for result in drafted if _mostly_faster(result, plain)]
    best = max(drafting, key=lambda result: result.speedup, default=plain)
    if best is plain or best.speedup < MARGIN:
        return plain

    def is_near(result: Confirmation) -> bool:
        unsure = result.finalist.default and not _mostly_faster(best, result)
        return unsure or result.speedup * AUTO_MARGIN >= best.speedup

    def preference(result: Confirmation) -> tuple[bool, bool, float]:
        finalist = result.finalist
        adapts = (finalist.spec, finalist.length) == (best.finalist.spec, "auto")
        return finalist.default, adapts, result.speedup

    return max(filter(is_near, drafting), key=preference)


def agrees(results: Sequence[Confirmation]) -> bool:
    """Whether most rounds say the same of plain decoding and of what drafts fastest by median, and
    the winner's speedups are close to each other."""
    (plain, *others), chosen = results, winner(results)
    drafted = [result for result in others if result.run.counts.drafted]
    best = max(drafted, key=lambda result: result.speedup, default=chosen)
    clear = best is plain or _mostly_faster(best, plain) or _mostly_faster(plain, best)
    return clear and max(chosen.ratios) <= CALM * min(chosen.ratios)


def _mostly_faster(one: Confirmation, other: Confirmation) -> bool:
    wins = [a > b for a, b in zip(one.ratios, other.ratios, strict=False)]
    return sum(wins) >= _MOST_OF * len(wins)


def affordable(
    finalists: list[Finalist], target: TargetCosts, options: TuneOptions, budget: Budget
) -> tuple[list[Finalist], int]:
    """The finalists confirmed, the first few at least, and prompts a round: two rounds must fit."""
    few = min(len(finalists), FEW + any(finalist.default for finalist in finalists))
    concurrency, rounds = options.concurrency, min(LEAST_ROUNDS, options.rounds)
    sizes = [max(_SIZES[0], concurrency), *(size for size in _SIZES[1:] if size >= concurrency)]
    step = target(concurrency, 1) * _SLOWER * options.max_tokens
    for many, size in product(dict.fromkeys((len(finalists), few)), sizes):
        seconds = many * -(-size // concurrency) * step * rounds
        if budget.seconds is None or seconds <= budget.left:
            return finalists[:many], size
    return finalists[:few], sizes[-1]

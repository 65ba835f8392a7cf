"""The whole of tuning: measure once, search, confirm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from paceline.core.costs import TargetCosts
from paceline.drafters import parse_draft
from paceline.errors import DataError, PacelineError
from paceline.lab.bench.engines import Starter
from paceline.lab.bench.prompts import BenchPrompt, fit, in_turn, tokens_needed
from paceline.lab.bench.runner import Heat
from paceline.lab.budget import Budget, Spending
from paceline.lab.tune import TuneOptions, measure
from paceline.lab.tune.search import (
    DrafterCandidate,
    MeasuredMethod,
    PredictedSetting,
    batch_sizes,
    default_candidate,
    hybrid_of,
)
from paceline.llm import LLM
from paceline.model.measure import measure_target
from paceline.settings.tuned import count_parameters

LARGEST_BATCH = 32  # to which break-even is sought
_DEFAULT_LENGTH = 8  # of the adaptive length
_ALONE = 4  # prompts decoded one at a time
_TARGET_SHARE = 0.2  # of the budget, for forwards of the target alone
# Tokens per sequence in these, and rounds; the second where time is short.
_FORWARDS = ((1, 2, 3, 4, 5, 7, 9, 12, 16, 20, 25), 5), ((1, 2, 4, 7, 13, 25), 2)
_MOST_SHARE = 1 / 3  # of the drafters' time, for any one of them


@dataclass
class TuningOutcome:
    """All that was measured so far. ``left_out``: what, and why; ``not_tried``: candidates that had
    no time. ``unrest``: slow plain steps by the fastest, within the measurement or from round to
    round. ``rounds`` of the confirmation are wanted, of ``size`` prompts each; ``heats`` has those
    done."""

    options: TuneOptions
    model: str
    parameters: int
    prompt_count: int = 0
    target: TargetCosts | None = None
    plain: MeasuredMethod | None = None
    methods: list[MeasuredMethod] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    unrest: float = 1.0
    finalists: list[measure.Finalist] = field(default_factory=list)
    heats: list[Heat] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    size: int = 0
    completed: Spending | None = None

    @classmethod
    def start(cls, options: TuneOptions, llm: LLM) -> TuningOutcome:
        """Of the target that ``llm`` has loaded."""
        return cls(options, llm.target.name, count_parameters(llm.target))

    @property
    def settings(self) -> list[PredictedSetting]:
        """The best setting of every method at the requested concurrency, the fastest first."""
        if self.target is None:
            return []
        batch = self.options.concurrency
        best = [method.best_length(self.target, batch) for method in self.methods]
        return sorted(best, key=lambda setting: setting.rate, reverse=True)

    @property
    def results(self) -> list[measure.Confirmation]:
        """Of the finalists, plain decoding first."""
        return measure.confirmations(self.finalists, self.heats)

    @property
    def chosen(self) -> measure.Confirmation | None:
        """Only once it is confirmed, by two rounds where as many are wanted."""
        wanted = min(measure.LEAST_ROUNDS, self.options.rounds)
        enough = self.heats and len(self.heats) >= wanted
        return measure.winner(self.results) if enough else None

    @property
    def largest_batch(self) -> int:
        return max(LARGEST_BATCH, self.options.concurrency)


class ShareSpentError(PacelineError):
    """Decoding was stopped, for it had used up its share of the time."""


def turns(candidates: Sequence[DrafterCandidate], options: TuneOptions) -> int:
    """About how often ``tune`` reports progress."""
    return 10 + len(candidates) + 6 * options.rounds


def tune(
    llm: LLM,
    candidates: Sequence[DrafterCandidate],
    prompts: Sequence[BenchPrompt],
    outcome: TuningOutcome,
    advance: Callable[[str], None],
    budget: Budget | None = None,
) -> None:
    """Fill ``outcome``. ``llm`` is idle; ``advance`` is told what comes next. Raises
    DataError if no prompt leaves room for answers, and what a requested candidate raises."""
    encoded = _encoded(llm, outcome, prompts)
    sample = _sample(encoded, outcome.options)
    run = _Tuning(llm, outcome, advance, budget or Budget(), encoded, sample)
    advance("loading drafters")
    default = next((candidate for candidate in candidates if candidate.default), None)
    measured = [candidate for candidate in candidates if not candidate.default]
    ordered = in_turn(measured, lambda candidate: candidate.family)
    for spec in {c.spec.partition(",")[0]: c.spec for c in ordered if c.requested}.values():
        run.beside(spec).close()  # what does not load is said before minutes pass
    try:
        if default is not None:
            default = run.composed(default)
        run.measure_target(len(ordered))
        run.measure_candidates(ordered)
        run.confirm(default)
    finally:
        done, rounds = len(ordered) - len(outcome.not_tried), f"rounds of {outcome.size} prompts"
        heats = len(outcome.heats)
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
    most = outcome.options.max_tokens
    fitting, left_out = fit(in_turn(prompts, lambda prompt: prompt.category), llm, most)
    if not fitting:
        raise DataError(
            f"no prompt leaves room for {most} tokens in the {llm.max_model_len} that "
            f"{llm.target.name} sees; give shorter prompts or a smaller --max-tokens"
        )
    outcome.prompt_count = len(fitting)
    for prompt in left_out:
        outcome.left_out.append((prompt.name, "too long for the model"))
    return [tokens for _, tokens in fitting]


def _sample(prompts: list[list[int]], options: TuneOptions) -> measure.Sample:
    """Those decoded alone are others than those decoded together, if there are enough."""
    wide = min(max(8, options.concurrency), LARGEST_BATCH)
    together = [prompts[number % len(prompts)] for number in range(2 * wide)]
    alone = prompts[2 * wide : 2 * wide + _ALONE] or prompts[-_ALONE:]
    return measure.Sample(alone, together, wide, options.max_tokens, options.temperature)


@dataclass
class _Tuning:
    """One run, in which everything has a share of the budget."""

    llm: LLM
    outcome: TuningOutcome
    advance: Callable[[str], None]
    budget: Budget
    prompts: list[list[int]]
    sample: measure.Sample

    @property
    def needed(self) -> int:
        """Tokens of the longest sequence."""
        return tokens_needed(self.llm, self.prompts, self.outcome.options.max_tokens)

    def beside(self, spec: str | None, batch: int | None = None) -> LLM:
        """With a drafter loaded, for fixed draft lengths; room for the sample or a ``batch``."""
        how: dict[str, Any] = {"draft_length": 0, "prefix_sharing": False, "seed": 0}
        how["max_model_len"] = self.needed
        return self.llm.beside(spec, max_batch_size=batch or self.sample.wide, **how)

    def loaded(self, candidate: DrafterCandidate) -> LLM | None:
        """None, and left out, if it does not load. Raises PacelineError if it was requested."""
        try:
            return self.beside(candidate.spec)
        except PacelineError as error:
            if candidate.requested:
                raise
            self.outcome.left_out.append((candidate.label, str(error)))
            return None

    def composed(self, default: DrafterCandidate) -> DrafterCandidate | None:
        """What the default draft is for this target; None if it does not load."""
        llm = self.loaded(default)
        if llm is None:
            return None
        llm.close()
        spec = llm.drafts[0]
        return default if spec == default.spec else default_candidate(spec)

    def measure_target(self, candidates: int) -> None:
        """The target's costs and plain decoding, once."""
        outcome = self.outcome
        self.advance("measuring the target")
        largest = self.beside(None, outcome.largest_batch)
        outcome.target = self.target_costs(largest)
        self.sample = measure.fitting_sample(self.sample, outcome.target, self.budget, candidates)
        self.advance("measuring plain decoding")
        outcome.plain, runs = measure.measure_plain(largest, outcome.target, self.sample)
        outcome.unrest = unrest_of(runs[0])
        largest.close()

    def target_costs(self, llm: LLM) -> TargetCosts:
        """Of chains, for each batch size that there is room and time for. ``llm`` is idle."""
        budget = self.budget.part(_TARGET_SHARE)

        def begin(size: int) -> AbstractContextManager[Any] | None:
            if not budget.fits("rows", size):
                return None
            self.advance(f"measuring the target: {size} at once")
            return budget.piece("rows", size)

        tokens, rounds = _FORWARDS[budget.seconds is not None]
        counts = dict.fromkeys(batch_sizes(self.outcome.options.concurrency, LARGEST_BATCH), tokens)
        return measure_target(llm.target, llm.engine.cache, counts, rounds=rounds, begin=begin)

    def measure_candidates(self, candidates: Sequence[DrafterCandidate]) -> None:
        """Each whole or not at all, until their share of the time is spent. One that takes more
        than its own is stopped."""
        outcome = self.outcome
        share = self.budget.part(measure.CANDIDATE_SHARE)
        whole = share.left
        for number, candidate in enumerate(candidates):
            if not share.fits("candidate"):
                outcome.not_tried.append(candidate.label)
                continue
            self.advance(f"measuring {candidate.label}")
            part = 1 / (len(candidates) - number)
            if share.seconds is not None:
                part = min(1.0, max(part, _MOST_SHARE * whole / share.left))
            try:
                with self.budget.piece("candidate"):
                    self._measure(candidate, share.part(part))
            except ShareSpentError:
                outcome.not_tried.append(f"{candidate.label} (stopped, too slow for its share)")

    def _measure(self, candidate: DrafterCandidate, budget: Budget) -> None:
        """Raises ShareSpentError if the ``budget`` does not last for it."""
        outcome = self.outcome
        assert outcome.target is not None and outcome.plain is not None
        llm = self.loaded(candidate)
        if llm is None:
            return

        def check() -> None:
            if budget.left <= 0:
                raise ShareSpentError

        try:
            known = outcome.target, outcome.plain, self.sample
            method = measure.measure_method(llm, candidate, *known, check)
        finally:
            llm.close()
        if any(method.levels.reached):
            outcome.methods.append(method)
        else:
            outcome.left_out.append((candidate.label, "it proposed nothing for these prompts"))

    def confirm(self, default: DrafterCandidate | None) -> None:
        """Rounds of the best settings."""
        outcome, options, budget = self.outcome, self.outcome.options, self.budget
        assert outcome.target is not None
        outcome.finalists, outcome.size = measure.affordable(
            choose(outcome, default), outcome.target, options, budget
        )
        jobs, repeats = measure.rounds_of(
            self.prompts, options.rounds, outcome.size, options.concurrency, self.sample.params()
        )
        starter = Starter(self.llm, max_model_len=self.needed)
        measure.confirm(
            starter, outcome.finalists, jobs, repeats, outcome.heats, self.advance, budget
        )
        outcome.unrest = max(outcome.unrest, measure.unrest_between(outcome.heats))


def unrest_of(run: measure.Run) -> float:
    """The target seconds that nine of ten steps stay below, by the fastest tenth's."""
    seconds = sorted(step.seconds["target"] for step in run.steps)
    if len(seconds) < 10:
        return 1.0
    return seconds[9 * len(seconds) // 10] / seconds[len(seconds) // 10]


def choose(
    outcome: TuningOutcome, default: DrafterCandidate | None = None
) -> list[measure.Finalist]:
    """Plain decoding; the ``default`` draft, adapting; the best two families, at their best length
    and adapting, first those that gain and look text up; a hybrid of the best drafter that looks
    text up and the best that runs a model, if both are predicted to gain anything."""
    best: dict[str, PredictedSetting] = {}
    for setting in outcome.settings:
        best.setdefault(setting.method.family, setting)

    def adapting(
        candidate: DrafterCandidate, members: Sequence[PredictedSetting]
    ) -> measure.Finalist:
        """Predicted by the best of its members."""
        return measure.Finalist(
            candidate.label,
            candidate.spec,
            "auto",
            max([_DEFAULT_LENGTH, *(setting.length for setting in members)]),
            max((setting.speedup for setting in members), default=None),
            tuple(setting.method for setting in members),
            candidate.default,
        )

    finalists = [measure.Finalist("plain", measure.PLAIN, 0, _DEFAULT_LENGTH)]
    if default is not None:
        kinds = [member.kind for member in parse_draft(default.spec).members()]
        finalists.append(adapting(default, [best[kind] for kind in kinds if kind in best]))
    first_two = list(best.values())[:2]
    for setting in sorted(first_two, key=lambda s: (s.speedup <= 1, not s.method.costs.costless)):
        method = setting.method
        longest = _DEFAULT_LENGTH if method.costs.costless else max(_DEFAULT_LENGTH, setting.length)
        finalists += [
            measure.Finalist(method.label, method.spec, length, longest, setting.speedup, (method,))
            for length in (setting.length, "auto")
        ]
    gaining = [s for s in best.values() if s.speedup > 1]
    lookup = next((s for s in gaining if s.method.costs.costless), None)
    model = next((s for s in gaining if not s.method.costs.costless), None)
    if lookup and model:
        finalists.append(adapting(hybrid_of(lookup.method, model.method), [lookup, model]))
    first = {finalist.key: finalist for finalist in finalists[::-1]}
    return [finalist for finalist in finalists if first[finalist.key] is finalist]

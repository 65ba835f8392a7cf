"""The whole of tuning: measure once, search, confirm, and put the outcome into a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from paceline.core.costs import TargetCosts
from paceline.drafters import parse_draft
from paceline.errors import DataError, PacelineError
from paceline.lab.bench.prompts import BenchPrompt, fit
from paceline.lab.bench.runner import in_turn
from paceline.lab.budget import Budget
from paceline.lab.tune.candidates import DrafterCandidate, hybrid_of
from paceline.lab.tune.candidates import default as default_of
from paceline.lab.tune.confirm import PLAIN, Confirmation, Finalist, Rounds, confirm, winner
from paceline.lab.tune.decode import ShareSpentError, decode
from paceline.lab.tune.measure import (
    Sample,
    copied_share,
    measure_method,
    measure_plain,
    target_costs,
    unrest_of,
)
from paceline.lab.tune.search import (
    MeasuredMethod,
    PredictedSetting,
    batch_sizes,
    best_batch,
    break_even,
    predict,
    search,
)
from paceline.lab.tune.spending import (
    CANDIDATE_SHARE,
    FEW,
    LEAST_ROUNDS,
    MOST_SHARE,
    TARGET_SHARE,
    TuneSpending,
    affordable,
    fitting_sample,
)
from paceline.lab.tune.spending import TuneOptions as TuneOptions
from paceline.llm import LLM
from paceline.model.identity import count_parameters

LARGEST_BATCH = 32  # to which break-even is sought
CALM = 1.5  # unrest beyond which figures are worth little
_DEFAULT_LENGTH = 8  # of the adaptive length
_ALONE = 4  # prompts decoded one at a time


@dataclass
class TuningOutcome:
    """All that was found out so far; Ctrl-C leaves what there is."""

    options: TuneOptions
    model: str
    parameters: int
    prompt_count: int = 0
    target: TargetCosts | None = None
    plain: MeasuredMethod | None = None
    methods: list[MeasuredMethod] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # what, and why
    unrest: float = 1.0  # slow plain steps by the fastest: the machine's other work
    copied: float = 0.0  # share of plain decoding's text that stood in the text before it
    at_other: tuple[float, float] | None = None  # another temperature, acceptance there
    results: list[Confirmation] = field(default_factory=list)
    chosen: Confirmation | None = None  # only once it is confirmed
    not_tried: list[str] = field(default_factory=list)  # candidates that had no time
    rounds: int = 0  # of the confirmation that are wanted, and the prompts of each
    size: int = 0
    spent: float = 0.0  # seconds, in all runs
    completed: TuneSpending | None = None

    @classmethod
    def start(cls, options: TuneOptions, llm: LLM) -> TuningOutcome:
        """Of the target that ``llm`` has loaded."""
        return cls(options, llm.target.name, count_parameters(llm.target))

    @property
    def settings(self) -> list[PredictedSetting]:
        """The best setting of every method at the requested concurrency, the fastest first."""
        if self.target is None:
            return []
        return search(self.methods, self.target, self.options.concurrency)

    @property
    def plain_rate(self) -> float:
        """Predicted tokens per second of plain decoding at the requested concurrency."""
        assert self.target is not None and self.plain is not None
        return predict(self.plain, self.target, 0, self.options.concurrency).rate

    def confirmed(self, method: MeasuredMethod) -> float | None:
        """The speedup that decoding with it showed, at its best; None: it was not confirmed."""
        results = [r for r in self.results if r.finalist.methods == (method,) and r.drafted]
        return max((r.speedup for r in results if r.ratios), default=None)

    def break_even_of(self, method: MeasuredMethod) -> int:
        assert self.target is not None and self.plain is not None
        return break_even(method, self.plain, self.target, self.largest_batch)

    @property
    def largest_batch(self) -> int:
        return max(LARGEST_BATCH, self.options.concurrency)


OnProgress = Callable[[str], None]


def turns(candidates: Sequence[DrafterCandidate], options: TuneOptions) -> int:
    """About how often ``tune`` reports progress."""
    return 10 + len(candidates) + 6 * options.rounds


def tune(
    llm: LLM,
    candidates: Sequence[DrafterCandidate],
    prompts: Sequence[BenchPrompt],
    outcome: TuningOutcome,
    advance: OnProgress,
    budget: Budget | None = None,
) -> None:
    """Fill ``outcome``. ``llm`` decodes plainly and is idle; ``advance`` says what comes next.

    An outcome that has something in it is added to. Raises DataError if no prompt leaves room for
    the answers, and what a given candidate raises when it loads; one that was only at hand is left
    out instead.
    """
    measured = [candidate for candidate in candidates if not candidate.default]
    ordered = in_turn(measured, lambda candidate: candidate.family)
    default = next((candidate for candidate in candidates if candidate.default), None)
    _Tuning(llm, outcome, advance, budget or Budget(), ordered, default).run(prompts)


@dataclass
class _Tuning:
    """One run, in which everything has a share of the budget."""

    llm: LLM
    outcome: TuningOutcome
    advance: OnProgress
    budget: Budget
    candidates: list[DrafterCandidate]
    default: DrafterCandidate | None = None

    def run(self, prompts: Sequence[BenchPrompt]) -> None:
        outcome, before = self.outcome, self.outcome.spent
        self.prompts = self._encoded(prompts)
        self.sample = _sample(self.prompts, outcome.options)
        self.advance("loading drafters")
        given = {c.spec.partition(",")[0]: c.spec for c in self.candidates if c.given}
        for spec in given.values():
            self._beside(spec).close()  # what does not load is told before minutes pass
        self._check_default()
        try:
            self._measure_target()
            self._measure_candidates()
            self._confirm()
            if outcome.at_other is None and self.budget.fits("candidate"):
                self.advance("measuring another temperature")
                self._other_temperature()
        finally:
            outcome.spent = before + self.budget.spent
            outcome.completed = self._completed()

    def _check_default(self) -> None:
        """It is composed for this target; one that does not load here is left out."""
        if self.default is None:
            return
        try:
            beside = self._beside(self.default.spec)
            if beside.drafts[0] != self.default.spec:
                self.default = default_of(beside.drafts[0])
            beside.close()
        except PacelineError as error:
            left_out = [*self.outcome.left_out, (self.default.label, str(error))]
            self.outcome.left_out = list(dict.fromkeys(left_out))
            self.default = None

    def _encoded(self, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
        """The prompts that leave room for the answers, one of each category in turn, so that any
        part of them has all."""
        llm, outcome = self.llm, self.outcome
        most = outcome.options.max_tokens
        ids, left_out = fit(in_turn(prompts, lambda prompt: prompt.category), llm, most)
        if not ids:
            raise DataError(
                f"no prompt leaves room for {most} tokens in the {llm.max_model_len} that "
                f"{llm.target.name} sees; give shorter prompts or a smaller --max-tokens"
            )
        outcome.prompt_count = len(ids)
        outcome.left_out += [(prompt.name, "too long for the model") for prompt in left_out]
        outcome.left_out = list(dict.fromkeys(outcome.left_out))
        return [tokens for _, tokens in ids]

    def _measure_target(self) -> None:
        """The target's costs and plain decoding, once."""
        outcome = self.outcome
        self.advance("measuring the target")
        largest = self.llm.beside(None, max_batch_size=outcome.largest_batch, prefix_sharing=False)
        if outcome.target is None:
            sizes = batch_sizes(outcome.options.concurrency, LARGEST_BATCH)
            share = self.budget.part(TARGET_SHARE)
            outcome.target = target_costs(largest, sizes, share, self.advance)
        many = len(self.candidates)
        self.sample = fitting_sample(self.sample, outcome.target, self.budget, many)
        if outcome.plain is None:
            self.advance("measuring plain decoding")
            outcome.plain, runs = measure_plain(largest, outcome.target, self.sample)
            outcome.unrest = unrest_of(runs[0])
            outcome.copied = copied_share(self.sample, runs)
        largest.close()

    def _measure_candidates(self) -> None:
        """Each whole or not at all, until their share of the time is spent. One that takes more
        than its own is stopped."""
        outcome = self.outcome
        known = {m.spec for m in outcome.methods} | {what for what, _ in outcome.left_out}
        outcome.not_tried = []
        share = self.budget.part(CANDIDATE_SHARE)
        whole = share.left
        new = [c for c in self.candidates if c.spec not in known and c.label not in known]
        for number, candidate in enumerate(new):
            if not share.fits("candidate"):
                outcome.not_tried.append(candidate.label)
                continue
            self.advance(f"measuring {candidate.label}")
            part = 1 / (len(new) - number)
            if share.seconds is not None:
                part = min(1.0, max(part, MOST_SHARE * whole / share.left))
            try:
                with self.budget.piece("candidate"):
                    self._measure(candidate, share.part(part))
            except ShareSpentError:
                outcome.not_tried.append(f"{candidate.label} (stopped, too slow for its share)")

    def _measure(self, candidate: DrafterCandidate, budget: Budget) -> None:
        """Raises ShareSpentError if the ``budget`` does not last for it."""
        outcome = self.outcome
        assert outcome.target is not None and outcome.plain is not None
        try:
            beside = self._beside(candidate.spec)
        except PacelineError as error:
            if candidate.given:
                raise
            outcome.left_out.append((candidate.label, str(error)))
            return
        sizes = outcome.target, outcome.plain, self.sample
        try:
            method = measure_method(beside, candidate, *sizes, budget)
        finally:
            beside.close()
        if any(method.reached):
            outcome.methods.append(method)
        else:
            outcome.left_out.append((candidate.label, "it proposed nothing for these prompts"))

    def _beside(self, spec: str) -> LLM:
        wide = self.sample.batches[1]
        return self.llm.beside(
            spec, max_batch_size=wide, draft_length=0, prefix_sharing=False, seed=0
        )

    def _confirm(self) -> None:
        """Rounds of the best settings; those of other finalists than before begin anew."""
        outcome, options, results = self.outcome, self.outcome.options, self.outcome.results
        assert outcome.target is not None
        finalists = choose(outcome, self.default)
        if not results or [r.finalist for r in results] != finalists[: len(results)]:
            results.clear()
            outcome.rounds = options.rounds
            finalists, outcome.size = affordable(
                finalists,
                outcome.target,
                options,
                self.budget,
                FEW + (self.default is not None),
            )
        elif len(results[0].ratios) >= outcome.rounds:
            outcome.rounds += options.rounds  # all that were wanted are there: as many again
        finalists = [result.finalist for result in results] or finalists
        rounds = Rounds.of(
            self.prompts,
            outcome.rounds,
            self.sample.params(),
            options.concurrency,
            outcome.size,
        )
        confirm(self.llm, finalists, rounds, results, self.advance, self.budget)
        enough = len(results[0].ratios) >= min(LEAST_ROUNDS, outcome.rounds)
        outcome.chosen = winner(results) if enough else None

    def _other_temperature(self) -> None:
        """Acceptance of the likeliest winner at temperature 1 if tuned for 0, else at 0."""
        best = next(iter(self.outcome.settings), None)
        if best is None:
            return
        other = 0.0 if self.outcome.options.temperature else 1.0
        changed, longest = replace(self.sample, temperature=other), best.method.longest
        beside = self._beside(best.method.spec)
        run = decode(beside, changed.together, changed.batches[1], changed.params(longest), longest)
        beside.close()
        if run.levels.reached:
            self.outcome.at_other = (other, run.levels.acceptance)

    def _completed(self) -> TuneSpending:
        outcome = self.outcome
        return TuneSpending(
            seconds=self.budget.seconds,
            spent=outcome.spent,
            candidates=len(self.candidates) - len(outcome.not_tried),
            candidates_wanted=len(self.candidates),
            rounds=len(outcome.results[0].ratios) if outcome.results else 0,
            rounds_wanted=outcome.rounds or outcome.options.rounds,
            prompts_a_round=outcome.size,
            not_tried=tuple(outcome.not_tried),
        )


def _sample(prompts: list[list[int]], options: TuneOptions) -> Sample:
    """Those decoded alone are others than those decoded together, if there are enough."""
    wide = min(max(8, options.concurrency), LARGEST_BATCH)
    together = [prompts[number % len(prompts)] for number in range(2 * wide)]
    alone = prompts[2 * wide : 2 * wide + _ALONE] or prompts[-_ALONE:]
    return Sample(alone, together, (1, wide), options.max_tokens, options.temperature)


def choose(outcome: TuningOutcome, default: DrafterCandidate | None = None) -> list[Finalist]:
    """Plain decoding; the ``default`` draft, adapting; the best two families, each at its best
    length and adapting, first those that gain and look text up; a hybrid.

    The hybrid is of the best drafter that looks text up and the best that runs a model, if both
    are predicted to gain anything.
    """
    concurrency, plain_rate = outcome.options.concurrency, outcome.plain_rate
    finalists = [Finalist("plain", PLAIN, PLAIN, 0, _DEFAULT_LENGTH, concurrency)]
    best: dict[str, PredictedSetting] = {}
    for setting in outcome.settings:
        best.setdefault(setting.method.family, setting)
    if default is not None:
        finalists.append(_as_commands_take_it(default, best, outcome))
    first_two = list(best.values())[:2]
    for setting in sorted(first_two, key=lambda s: (s.rate <= plain_rate, not s.method.lookup)):
        finalists += _both_lengths(setting, outcome)
    gaining = [s for s in best.values() if s.rate > plain_rate]
    lookup = next((s for s in gaining if s.method.lookup), None)
    model = next((s for s in gaining if not s.method.lookup), None)
    if lookup and model:
        both = hybrid_of(lookup.method, model.method)
        longest = max(_DEFAULT_LENGTH, model.length)
        predicted = max(lookup.rate, model.rate) / plain_rate
        members = (lookup.method, model.method)
        named = (both.label, both.spec, both.family)
        finalists.append(Finalist(*named, "auto", longest, concurrency, predicted, members))
    first = {(finalist.spec, finalist.length): finalist for finalist in finalists[::-1]}
    return [finalist for finalist in finalists if first[finalist.spec, finalist.length] is finalist]


def _as_commands_take_it(
    default: DrafterCandidate, best: dict[str, PredictedSetting], outcome: TuningOutcome
) -> Finalist:
    """Predicted by those of its members that were measured."""
    known = [best[m.kind] for m in parse_draft(default.spec).members() if m.kind in best]
    predicted = max((s.rate for s in known), default=0.0) / outcome.plain_rate
    return Finalist(
        default.label,
        default.spec,
        default.family,
        "auto",
        max([_DEFAULT_LENGTH, *(setting.length for setting in known)]),
        outcome.options.concurrency,
        predicted if known else None,
        tuple(setting.method for setting in known),
        default=True,
    )


def _both_lengths(setting: PredictedSetting, outcome: TuningOutcome) -> list[Finalist]:
    assert outcome.target is not None
    method = setting.method
    best = best_batch(method, outcome.target, outcome.options.concurrency)
    predicted = best.rate / outcome.plain_rate
    longest = _DEFAULT_LENGTH if method.lookup else max(_DEFAULT_LENGTH, best.length)
    named = (method.label, method.spec, method.family)
    return [
        Finalist(*named, length, longest, best.batch, predicted, (method,))
        for length in (best.length, "auto")
    ]

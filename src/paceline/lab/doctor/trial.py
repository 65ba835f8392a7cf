"""Ten seconds of decoding with a loaded pair on the shipped prompts: the drafter is measured as by
``tune``, and the draft length that promises most is run beside plain decoding."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.core.costs import TargetCosts
from paceline.core.params import SamplingParams
from paceline.engine.driver import StepSums
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.budget import Budget
from paceline.lab.doctor.findings import Finding, finding
from paceline.lab.tune.measure import Sample, decode, measure_method, measure_plain
from paceline.lab.tune.search import (
    DrafterCandidate,
    MeasuredMethod,
    PredictedSetting,
    predicted_by_measured,
)
from paceline.llm import LLM
from paceline.model.measure import measure_target

SECONDS = 10.0  # of measuring, by default
LONG = 8  # levels of the exploration
_EXPLORE = 0.6  # of the budget; the rest confirms
_DRAFTED = 1.5  # runs with drafts of every prompt: long ones, and short ones of a brief answer
_MOST_TOKENS, _LEAST_TOKENS, _FIRST_TOKENS, _PROMPT_TOKENS = 64, 3 * LONG, LONG + 2, 256


@dataclass(frozen=True)
class SpeedupTrial:
    """``target``: forwards alone. ``plain``: steps that only decode. ``method``: with drafts of up
    to ``LONG`` levels. ``measured_speedup``: at the best draft length, the median of prompts."""

    target: TargetCosts
    plain: StepSums
    method: MeasuredMethod
    measured_speedup: float = 0.0
    seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Of the drafted tokens that were tried, the share that was accepted; None without any."""
        return self.method.levels.acceptance if self.method.levels.reached else None

    @property
    def draft_cost_ratio(self) -> float | None:
        """One pass of the drafter over one plain target forward; None if it takes none."""
        if self.method.costs.costless:
            return None
        length, longest = max(self.method.steps, key=lambda step: step[0])
        one_pass = longest.mean_seconds("draft") / self.method.costs.passes[length]
        return one_pass / self.plain.mean_seconds("target")

    @property
    def predicted_speedup_by_length(self) -> list[float]:
        """Over plain decoding, of lengths 1, 2, ..."""
        lengths = range(1, self.method.costs.longest + 1)
        return [self.method.predict(self.target, length, 1).speedup for length in lengths]

    @property
    def best(self) -> PredictedSetting:
        """Of the draft length that promises most."""
        return self.method.best_length(self.target, 1)

    @property
    def predicted_by_measured(self) -> float:
        """1.1 promises 10 % too much."""
        return predicted_by_measured(self.best.speedup, self.measured_speedup)


def run_trial(
    plain: LLM, spec: LLM, budget: Budget, between: Callable[[], object] = lambda: None
) -> SpeedupTrial:
    """Measure a pair in about the budget's time, greedily, one sequence at a time, on the first 256
    tokens of prompts; at least one in each way. ``spec`` decodes with the draft, at fixed lengths.
    ``between`` is called after every step."""
    exploring = budget.part(_EXPLORE)
    most = max(1, min(_PROMPT_TOKENS, plain.max_model_len // 2))
    prompts = [prompt.encode(plain)[:most] for prompt in load_prompts(per_category=1)]

    def run(llm: LLM, ids: list[int], tokens: int, length: int) -> StepSums:
        """Past end tokens; the step that reads the prompt is left out."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, draft_length=length)
        return sum(decode(llm, [ids], 1, params, length, between).steps, StepSums())

    def first(llm: LLM) -> tuple[float, float]:
        """Seconds of reading a prompt, and of every token behind it."""
        before = budget.spent
        steps = run(llm, prompts[0], _FIRST_TOKENS, LONG)
        return budget.spent - before - steps.whole, 1 / (steps.rate or 1.0)

    (read, token), (drafted_read, drafted_token) = first(plain), first(spec)
    target = measure_target(plain.target, plain.engine.cache, {1: (1, 2, _ROWS, LONG + 1)})
    # Three prompts at least should have their turn, each plainly and with drafts.
    reading, one_token = read + _DRAFTED * drafted_read, token + _DRAFTED * drafted_token
    left = max(0.0, exploring.left)
    room = plain.max_model_len - most - 1
    affordable = int((left / 3 - reading) / one_token)
    tokens = max(1, min(_MOST_TOKENS, room, max(_LEAST_TOKENS, affordable)))
    count = max(1, int(left / (reading + tokens * one_token)))
    repeated = list(itertools.islice(itertools.cycle(prompts), count))
    sample = Sample(repeated, [], 1, tokens, 0.0, ignore_eos=True)
    base, (alone, _) = measure_plain(plain, target, sample, between)
    candidate = DrafterCandidate("draft", "draft", "draft", "")
    method = measure_method(spec, candidate, target, base, sample, between, LONG)
    best = method.best_length(target, 1).length
    ratios: list[float] = []
    for ids in itertools.cycle(prompts):
        ratios.append(run(spec, ids, tokens, best).rate / run(plain, ids, tokens, 0).rate)
        if budget.left <= 0:
            break
    median, plain_steps = statistics.median(ratios), sum(alone.steps, StepSums())
    return SpeedupTrial(target, plain_steps, method, median, budget.spent)


VERDICTS = ("worth-it", "barely-worth-it", "not-worth-it")
_WORTH, _HARMLESS = 1.1, 0.97  # speedups from which a draft helps, and does no harm
_UNSURE = 1.25  # between prediction and measurement, either way
_LOW = 0.4  # acceptance
_DEAR = 1 / 3  # of a target forward, for one pass of the drafter
_ROWS, _STEEP = 5, 1.5  # so many rows should cost less than so many times one


def judge(trial: SpeedupTrial) -> Iterator[Finding]:
    measured, length, predicted = trial.measured_speedup, trial.best.length, trial.best.speedup
    ratio, rate = trial.draft_cost_ratio, trial.acceptance_rate
    accepted = "no draft was tried" if rate is None else f"{rate:.0%} accepted"
    text = f"measured {measured:.2f}x of plain decoding at draft length {length}"
    code = VERDICTS[(measured < _WORTH) + (measured < _HARMLESS)]
    yield finding(code, f"{text}, predicted {predicted:.2f}x; {accepted}")
    if not 1 / _UNSURE <= trial.predicted_by_measured <= _UNSURE:
        yield finding("measurement-unsure", predicted=predicted, measured=measured)
    if ratio is not None and rate is not None and rate < _LOW:
        yield finding("acceptance-low", rate=rate)
    if ratio is not None and ratio > _DEAR:
        yield finding("draft-dear", ratio=ratio)
    growth = trial.target(1, _ROWS) / trial.target(1, 1)
    if growth > _STEEP:
        yield finding("verify-dear", rows=_ROWS, growth=growth)

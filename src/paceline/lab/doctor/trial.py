"""Ten seconds of decoding with a loaded pair on the shipped prompts: the drafter is measured as by
``tune``, and the draft length that promises most is run beside plain decoding. Then what
the doctor says, findings and figures, for the screen, reports and JSON."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.costs import TargetCosts
from paceline.core.params import SamplingParams
from paceline.engine.driver import StepSums
from paceline.lab.bench.prompts import load_prompts
from paceline.lab.budget import Budget
from paceline.lab.doctor.findings import ERROR, OK, WARNING, Finding, finding
from paceline.lab.report import plots
from paceline.lab.report.document import (
    Column,
    Figure,
    Report,
    Table,
    Text,
    record_of,
    share,
    table_across,
    table_of,
    times,
)
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


_FINDINGS = (
    Column("severity", " ", "severity.value"),
    Column("about", "about"),
    Column("found", "found", "text"),
    *(Column(key, key) for key in ("consequence", "cure")),
    Column("code"),
)


def _rows(costs: TargetCosts) -> list[dict[str, float]]:
    pairs = zip(costs.curves[0].tokens, costs.curves[0].seconds, strict=True)
    return [{"rows": rows, "seconds": seconds} for rows, seconds in pairs]


def _growth(costs: TargetCosts) -> str:
    first, *more = _rows(costs)
    return ", ".join(f"{r['seconds'] / first['seconds']:.2f}x for {r['rows']}" for r in more)


_TRIAL = (
    Column("plain_tokens_per_second", "plain decoding, tokens/s", "plain.rate", "{:.0f}".format),
    Column("acceptance_rate", "acceptance rate", shown=share),
    Column("acceptance_per_position", "", "method.levels.rates"),
    Column("drafts_per_position", "", "method.levels.reached"),
    Column("draft_cost_ratio", "draft pass / target forward", shown="{:.2f}".format),
    Column("target_seconds_by_rows", "target forward by rows", "target", _growth, _rows),
    Column("predicted_speedup_by_length"),
    Column("best_draft_length", "best draft length", "best.length"),
    Column("predicted_speedup", "predicted speedup", "best.speedup", times),
    Column("measured_speedup", "measured speedup", shown=times),
    Column("predicted_by_measured", "predicted / measured", shown="{:.2f}".format),
    Column("seconds"),
)


def record(
    target: str, draft: str | None, findings: Sequence[Finding], trial: SpeedupTrial | None
) -> dict[str, Any]:
    return {
        "model": target,
        "draft": draft,
        "errors": sum(item.severity is ERROR for item in findings),
        "warnings": sum(item.severity is WARNING for item in findings),
        "findings": [record_of(item, _FINDINGS) for item in findings],
        "run": None if trial is None else record_of(trial, _TRIAL),
    }


def report_of(
    target: str, draft: str | None, findings: Sequence[Finding], trial: SpeedupTrial | None
) -> Report:
    """What to look at first, then what was measured, then what is in order."""
    document = Report(f"{target} with {draft or 'no draft'}")
    if bad := [item for item in findings if item.severity is not OK]:
        errors, warnings = (sum(f.severity is s for f in bad) for s in (ERROR, WARNING))
        counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        document.add("Findings", table_of(bad, _FINDINGS), Text(counts, warning=errors > 0))
    if trial is not None:
        verdicts = [item for item in findings if item.code in VERDICTS]
        words = [Text(f"{item.code.replace('-', ' ')}: {item.text}") for item in verdicts]
        document.add("Measured", *words, *_measured(trial))
    if fine := [f for f in findings if f.severity is OK and f.code not in VERDICTS]:
        rows = [(item.about, item.text) for item in fine]
        document.add("In order", Table(("about", "found"), rows))
    return document


def _measured(trial: SpeedupTrial) -> list[Table | Figure]:
    shown = [column for column in _TRIAL if column.heading and column.value(trial) is not None]
    how = "one greedy sequence at a time on shipped prompts; prompts are not timed"
    note = f"{trial.seconds:.0f} s, {how}."
    predicted, best = trial.predicted_speedup_by_length, trial.best.length
    lengths = list(range(1, len(predicted) + 1))
    measured = [trial.measured_speedup if length == best else None for length in lengths]
    series: plots.Series = {"predicted": predicted, "measured": measured}
    figure = Figure(
        "Speedup over plain decoding by draft length",
        lambda: plots.lines(lengths, series, "draft length", "speedup"),
        "speedup",
    )
    return [table_across("figure", {"value": trial}, shown, note), figure]

"""An outcome as a report for people, a record for machines, and tuned settings for engines."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from msgspec import to_builtins

from paceline.lab.report.document import (
    NOTES,
    Column,
    Report,
    Text,
    number,
    record_of,
    share,
    table_of,
    times,
)
from paceline.lab.tune.measure import CALM, PLAIN, Confirmation
from paceline.lab.tune.plan import TuningOutcome
from paceline.lab.tune.search import MeasuredMethod
from paceline.llm import LLM
from paceline.settings.tuned import (
    VERSION,
    DraftChoice,
    EngineChoice,
    KnownCosts,
    MachineIdentity,
    Measured,
    ModelIdentity,
    PassCosts,
    TunedSettings,
)

_AGREES = 0.15  # how far off a prediction may be that is shown beside what was measured
_BATCH = 8  # of tuned settings at least: requests that were not expected may join
_NOTES = NOTES["tune"]
_rounded = "{:.0f}".format


def _searched(outcome: TuningOutcome) -> tuple[Column, ...]:
    """Of a setting of the search, beside what else is known of the target."""
    target = outcome.target
    assert target is not None
    until = partial(MeasuredMethod.break_even, target=target, largest=outcome.largest_batch)
    return (
        Column("method", "method", "method.label"),
        Column("spec", "", "method.spec"),
        Column("draft_length", "len.", "length"),
        Column("batch", "", "batch"),
        Column("acceptance", "", "method.levels.rates"),
        Column("reached", "", "method.levels.reached"),
        Column("", "acc.", "method.levels.acceptance", number),
        Column("tokens_per_step", "tok/step", "tokens_per_step", number),
        Column("step_seconds", "ms", "seconds", lambda seconds: f"{seconds * 1e3:.1f}"),
        Column("draft_seconds", "", "drafting"),
        Column("", "draft", "", lambda setting: share(setting.drafting / setting.seconds)),
        Column("cost_ratio", "", "method", stored=lambda method: method.pass_ratio(target)),
        Column("predicted_tokens_per_second", "tok/s", "rate", _rounded),
        Column("predicted_speedup", "speedup", "speedup", times),
        Column("break_even_batch", "until", "method", until, until),
    )


def _whole(result: Confirmation) -> str:
    drafted = result.run.counts.drafted or result.finalist.spec == PLAIN
    return times(result.speedup) if drafted else "never drafted"


def _predicted(result: Confirmation) -> str:
    """Nothing where it was wrong."""
    off = result.predicted_by_measured
    return times(result.finalist.predicted) if off and abs(off - 1) <= _AGREES else ""


_CONFIRMED = (
    Column("finalist", "finalist", "finalist.name"),
    Column("spec", "", "finalist.spec"),
    Column("draft_length", "", "finalist.length"),
    Column("tokens_per_second", "tok/s", "rate", _rounded),
    Column("tokens_per_step", "tok/step", "run.tokens_per_step", number),
    Column("drafted", "", "run.counts.drafted"),
    Column("predicted_speedup", "", "finalist.predicted"),
    Column("", "predicted", "", _predicted),
    Column("", "decoding", "decoding_speedup", times),
    Column("decoding_tokens_per_second", "", "run.decoding.rate"),
    Column("speedup", "", "speedup"),
    Column("", "whole", "", _whole),
    Column("predicted_by_measured", ""),
    Column("ratios", "spread", shown=lambda ratios: f"{min(ratios):.2f} to {max(ratios):.2f}"),
)


def decision(outcome: TuningOutcome) -> str:
    """What is chosen and why, in one sentence; also while something is missing."""
    chosen, results = outcome.chosen, outcome.results
    drafting = [r for r in results[1:] if r.ratios and r.run.counts.drafted]
    drafting.sort(key=lambda result: -result.speedup)
    shown = ", ".join(f"{r.finalist.name} {r.speedup:.2f}x" for r in drafting)
    if chosen is not None and chosen.finalist != results[0].finalist:
        return (
            f"{chosen.finalist.name}: {chosen.rate:.0f} tokens/s against {results[0].rate:.0f}, "
            f"{chosen.speedup:.2f}x plain decoding, {chosen.run.tokens_per_step:.2f} tokens a step."
        )
    slower = bool(drafting) and drafting[0].speedup < 1
    if chosen is not None:
        why = "all drafts were slower" if slower else "no draft was clearly faster"
        return f"Plain decoding: {why}{f' ({shown})' if shown else ''}."
    if drafting:
        advice = f"by plain decoding: {shown}"
        if slower:
            advice = f"no draft is advised, all were slower than plain decoding ({shown})"
        done = f"after {len(drafting[0].ratios)} of {outcome.options.rounds} rounds"
        return f"Not confirmed: {done} {advice}. Give more --seconds."
    if outcome.settings:
        best = outcome.settings[0]
        return (
            f"Not confirmed: {best.method.label} at length {best.length} is predicted to reach "
            f"{best.speedup:.2f}x plain decoding, but nothing was decoded to confirm it."
        )
    return "Nothing was measured to the end."


def report_of(outcome: TuningOutcome) -> Report:
    """Sections for what is there: an interrupted run has fewer."""
    options, settings, results = outcome.options, outcome.settings, outcome.results
    report = Report(f"Tuning {outcome.model}")
    if settings:
        how = f"{options.concurrency} at once, temperature {options.temperature:g}"
        title = f"Predicted, each method at its best length, {how}"
        left = "; ".join(f"{what}: {why}" for what, why in outcome.left_out)
        report.add(
            "Search",
            *([Text(_NOTES["busy"].format(outcome.unrest), True)] if outcome.unrest > CALM else []),
            table_of(settings, _searched(outcome), _NOTES["predicted"].format(outcome), title),
            *([Text(f"Left out: {left}")] if left else []),
        )
    if results and results[0].ratios:
        note = _NOTES["confirmed"].format(len(results[0].ratios))
        report.add("Confirmed by decoding", table_of(results, _CONFIRMED, note))
    completed = [] if outcome.completed is None else [Text(outcome.completed.line)]
    report.add("Choice", Text(decision(outcome), warning=outcome.chosen is None), *completed)
    return report


def tuning_record(outcome: TuningOutcome) -> dict[str, Any]:
    """Everything as plain values, for ``--json``."""
    target, settings, results = outcome.target, outcome.settings, outcome.results
    return {
        "model": outcome.model,
        "parameters": outcome.parameters,
        **asdict(outcome.options),
        "prompts": outcome.prompt_count,
        "decision": decision(outcome),
        "confirmed": outcome.chosen is not None,
        "unrest": outcome.unrest,
        "target_costs": target and to_builtins(_known_costs(outcome)),
        "search": [record_of(s, _searched(outcome)) for s in settings],
        "confirmation": [record_of(r, _CONFIRMED) for r in results],
        "budget": outcome.completed and asdict(outcome.completed),
        "left_out": [{"what": what, "why": why} for what, why in outcome.left_out],
    }


def _known_costs(outcome: TuningOutcome) -> KnownCosts:
    """Of the target, and of the passes of the drafters that were chosen."""
    target, chosen = outcome.target, outcome.chosen
    assert target is not None
    used = () if chosen is None else chosen.finalist.methods
    return KnownCosts(
        batches=target.batches,
        tokens=target.curves[0].tokens,
        target=tuple(curve.seconds for curve in target.curves),
        passes={m.family: PassCosts(m.costs.seconds.tokens, m.costs.seconds.seconds) for m in used},
    )


def tuned_settings(outcome: TuningOutcome, llm: LLM) -> TunedSettings:
    """Those of a confirmed outcome; ``llm`` has the target loaded."""
    chosen = outcome.chosen
    assert chosen is not None and outcome.target is not None
    finalist, options, used = chosen.finalist, outcome.options, chosen.finalist.methods
    best = max(used, key=lambda m: sum(m.survival), default=None)
    ends = (m.break_even(outcome.target, outcome.largest_batch) for m in used)
    return TunedSettings(
        version=VERSION,
        model=ModelIdentity.of(llm.target),
        draft=DraftChoice(finalist.spec, finalist.length, finalist.max_length),
        engine=EngineChoice(max(_BATCH, options.concurrency), "auto"),
        measured=Measured(
            concurrency=options.concurrency,
            temperature=options.temperature,
            prompts=options.source,
            prompt_count=outcome.prompt_count,
            plain_tokens_per_second=round(outcome.results[0].rate, 1),
            tokens_per_second=round(chosen.rate, 1),
            speedup=round(chosen.speedup, 3),
            predicted_speedup=round(finalist.predicted or 0.0, 3),
            tokens_per_step=round(chosen.run.tokens_per_step, 3),
            acceptance=tuple(round(rate, 3) for rate in best.levels.rates) if best else (),
            break_even_batch=max(ends, default=0),
            why=(decision(outcome),),
        ),
        costs=_known_costs(outcome),
        machine=MachineIdentity.of(llm.target),
    )

"""An outcome as a report for people, a record for machines, and a profile for engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.lab.report import columns
from paceline.lab.report.columns import Column, table_of
from paceline.lab.report.document import Figure, Report, Text
from paceline.lab.report.plots import lines
from paceline.lab.tune.advice import advise
from paceline.lab.tune.confirm import Confirmation
from paceline.lab.tune.plan import CALM, TuningOutcome
from paceline.lab.tune.search import PredictedSetting, batch_sizes, pass_ratio, speedups
from paceline.llm import LLM
from paceline.model.identity import ModelIdentity
from paceline.settings.tuned import (
    VERSION,
    DraftChoice,
    EngineChoice,
    KnownCosts,
    MachineIdentity,
    Measured,
    PassCosts,
    TunedProfile,
)

_SHOWN = 4  # methods in the plot
_BUSY = (
    "The machine was busy: plain steps took up to {:.1f} times the fastest. Do not trust these "
    "figures; tune again when it is idle."
)
_PREDICTED = (
    "Plain decoding: {0.plain_rate:.0f} tok/s predicted. len.: levels. acc.: share of tried "
    "positions accepted. ms: a step; draft: its share. until: the largest batch that gains, sought "
    "to {0.largest_batch}. {0.prompt_count} prompts at hand."
)
_CONFIRMATION = (
    "All by plain decoding. predicted and decoding: without reading prompts. whole: with it, the "
    "median of {} rounds in turns; it decides. pred./meas.: predicted by decoding. Length auto is "
    "taken unless a fixed one beats it by 3 %."
)


def _spread(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def _seconds(setting: PredictedSetting) -> dict[str, float]:
    return {"draft": setting.drafting, "total": setting.seconds}


def _sought(outcome: TuningOutcome) -> tuple[Column, ...]:
    """Of a setting of the search, beside what else is known of the target."""
    target = outcome.target
    assert target is not None
    return (
        Column("method", "method", "method.label"),
        Column("spec", "", "method.spec"),
        Column("draft_length", "len.", "length"),
        Column("batch", "", "batch"),
        Column("acceptance", "", "method.acceptance"),
        Column("reached", "", "method.reached"),
        Column("", "acc.", "method.mean_acceptance", "{:.2f}".format),
        Column("tokens_per_step", "tok/step", "tokens_per_step", "{:.2f}".format),
        Column("step_seconds", "ms", "", lambda s: f"{s.seconds * 1e3:.1f}", _seconds),
        Column("", "draft", "", lambda s: f"{s.drafting / s.seconds:.0%}"),
        Column("cost_ratio", "", "method", stored=lambda method: pass_ratio(method, target)),
        Column("predicted_tokens_per_second", "tok/s", "rate", "{:.0f}".format),
        Column(
            "predicted_speedup",
            "speedup",
            "rate",
            lambda rate: f"{rate / outcome.plain_rate:.2f}x",
            lambda rate: rate / outcome.plain_rate,
        ),
        Column("break_even_batch", "until", "method", outcome.break_even_of, outcome.break_even_of),
    )


_ADVICE = (
    Column("", "rule of the field", "rule"),
    Column("", "measured here", "measured"),
    Column("", "so", "verdict"),
    Column("", "rule", "holds", lambda holds: "agrees" if holds else "DISAGREES"),
)


def _confirmed(outcome: TuningOutcome) -> tuple[Column, ...]:
    """Beside plain decoding's rate once the prompts are read."""
    plain = outcome.results[0].decoding_rate if outcome.results else 0.0

    def by_plain(rate: float) -> str:
        return f"{rate / max(plain, 1e-9):.2f}x"

    def ratio(result: Confirmation) -> float | None:
        return result.predicted_by_measured(plain)

    def ratio_shown(result: Confirmation) -> str | None:
        gain = ratio(result)
        return f"{gain:.2f}" if plain and gain is not None else None

    return (
        Column("finalist", "finalist", "finalist.name"),
        Column("spec", "", "finalist.spec"),
        Column("draft_length", "", "finalist.length"),
        Column("batch", "batch", "finalist.batch"),
        Column("tokens_per_second", "tok/s", "rate", "{:.0f}".format),
        Column("tokens_per_step", "tok/step", "tokens_per_step", "{:.2f}".format),
        Column("drafted", "", "drafted"),
        Column("predicted_speedup", "predicted", "finalist.predicted", "{:.2f}x".format),
        Column("decoding_tokens_per_second", "decoding", "decoding_rate", by_plain),
        Column("speedup", "", "speedup"),
        Column("", "whole", "", lambda r: f"{r.speedup:.2f}x" if r.ran else "never drafted"),
        Column("predicted_by_measured", "pred./meas.", "", ratio_shown, ratio),
        Column("ratios", "spread", "ratios", _spread),
    )


def decision(outcome: TuningOutcome) -> str:
    """What is chosen and why, in one sentence; also while something is missing."""
    chosen = outcome.chosen
    drafting = [r for r in outcome.results[1:] if r.ratios and r.drafted]
    drafting.sort(key=lambda result: -result.speedup)
    shown = ", ".join(f"{r.finalist.name} {r.speedup:.2f}x" for r in drafting)
    if chosen is None and drafting:
        after = f"Not confirmed: after {len(drafting[0].ratios)} of {outcome.rounds} rounds"
        if drafting[0].speedup < 1:
            advice = f"no draft is advised, all were slower than plain decoding ({shown})"
        else:
            advice = f"by plain decoding: {shown}"
        return f"{after} {advice}. --continue adds rounds."
    if chosen is None:
        best = next(iter(outcome.settings), None)
        if best is None:
            return "Nothing was measured to the end."
        gain = best.rate / outcome.plain_rate
        return (
            f"Not confirmed: {best.method.label} at length {best.length} is predicted to reach "
            f"{gain:.2f}x plain decoding, but nothing was decoded to confirm it."
        )
    plain = outcome.results[0]
    if chosen is plain:
        if not drafting:
            return "Plain decoding: no draft was clearly faster."
        if drafting[0].speedup < 1:
            return f"Plain decoding: all drafts were slower ({shown})."
        return f"Plain decoding: no draft was clearly faster ({shown})."
    return (
        f"{chosen.finalist.name}: {chosen.rate:.0f} tokens/s against {plain.rate:.0f}, "
        f"{chosen.speedup:.2f}x plain decoding, {chosen.tokens_per_step:.2f} tokens a step."
    )


def report_of(outcome: TuningOutcome) -> Report:
    """Sections for what is there: an interrupted run has fewer."""
    options = outcome.options
    report = Report(f"Tuning {outcome.model}")
    settings = outcome.settings
    if settings:
        busy = Text(_BUSY.format(outcome.unrest), warning=True)
        note = _PREDICTED.format(outcome)
        title = (
            f"Predicted, each method at its best length, {options.concurrency} at once, "
            f"temperature {options.temperature:g}"
        )
        left = "; ".join(f"{what}: {why}" for what, why in outcome.left_out)
        report.add(
            "Search",
            *([busy] if outcome.unrest > CALM else []),
            table_of(settings, _sought(outcome), note, title),
            *([Text(f"Left out: {left}")] if left else []),
        )
    if outcome.results and outcome.results[0].ratios:
        rounds = max(len(result.ratios) for result in outcome.results)
        table = table_of(outcome.results, _confirmed(outcome), _CONFIRMATION.format(rounds))
        report.add("Confirmed by decoding", table)
    advice = advise(outcome)
    if advice:
        report.add("Why", table_of(advice, _ADVICE))
    completed = [] if outcome.completed is None else [Text(outcome.completed.line)]
    report.add("Choice", Text(decision(outcome), warning=outcome.chosen is None), *completed)
    if settings:
        report.add("Pictures", *_figures(outcome, options.concurrency))
    return report


def _figures(outcome: TuningOutcome, concurrency: int) -> list[Figure]:
    target, plain = outcome.target, outcome.plain
    assert target is not None and plain is not None
    sizes = batch_sizes(concurrency, outcome.largest_batch)
    best: dict[str, Any] = {}
    for setting in outcome.settings:
        best.setdefault(setting.method.family, setting.method)
    gains: dict[str, list[float | None]] = {"plain": [1.0] * len(sizes)}
    for method in list(best.values())[:_SHOWN]:
        last = outcome.break_even_of(method)
        end = f"{last}+" if last >= outcome.largest_batch else str(last)
        gains[f"{method.label} (gains to {end})"] = list(speedups(method, plain, target, sizes))
    counts = [n for n in (1, 2, 4, 8, 16, 24) if n <= target.curves[0].tokens[-1]]
    curves: dict[str, list[float | None]] = {
        f"{batch} sequences": [curve(n) / curve(1) for n in counts]
        for batch, curve in zip(target.batches, target.curves, strict=True)
    }
    return [
        Figure(
            "Predicted speedup against concurrency",
            lambda: lines(sizes, gains, "sequences at once", "tokens/s by plain", log_x=True),
            "speedup",
        ),
        Figure(
            "What verifying costs",
            lambda: lines(counts, curves, "tokens per sequence", "seconds by those of 1 token"),
            "costs",
        ),
    ]


def record_of(outcome: TuningOutcome) -> dict[str, Any]:
    """Everything as plain values, for ``--json``."""
    chosen, target = outcome.chosen, outcome.target
    return {
        "model": outcome.model,
        "parameters": outcome.parameters,
        **asdict(outcome.options),
        "prompts": outcome.prompt_count,
        "decision": decision(outcome),
        "confirmed": chosen is not None,
        "plain_predicted_tokens_per_second": outcome.plain_rate if outcome.settings else None,
        "copied_share": outcome.copied,
        "unrest": outcome.unrest,
        "target_costs": None
        if target is None
        else {
            "batches": target.batches,
            "tokens": target.curves[0].tokens,
            "seconds": [curve.seconds for curve in target.curves],
        },
        "search": [columns.record_of(setting, _sought(outcome)) for setting in outcome.settings],
        "confirmation": [
            columns.record_of(result, _confirmed(outcome)) for result in outcome.results
        ],
        "advice": [asdict(item) for item in advise(outcome)],
        "budget": None if outcome.completed is None else asdict(outcome.completed),
        "left_out": [{"what": what, "why": why} for what, why in outcome.left_out],
    }


def profile_of(outcome: TuningOutcome, llm: LLM) -> TunedProfile:
    """The profile of a confirmed outcome; ``llm`` has the target loaded."""
    chosen = outcome.chosen
    assert chosen is not None and outcome.target is not None
    finalist, options = chosen.finalist, outcome.options
    # Requests that were not expected may join, unless a smaller batch proved faster.
    batch_size = 8 if finalist.batch == options.concurrency else finalist.batch
    used = finalist.methods
    passes = {m.family: PassCosts(m.pass_seconds.tokens, m.pass_seconds.seconds) for m in used}
    best = max(used, key=lambda m: sum(m.survival), default=None)
    advice = [f"{item.rule}: {item.measured}: {item.verdict}" for item in advise(outcome)]
    return TunedProfile(
        version=VERSION,
        model=ModelIdentity.of(llm.target),
        draft=DraftChoice(finalist.spec, finalist.length, finalist.max_length),
        engine=EngineChoice(max(batch_size, finalist.batch), "auto"),
        measured=Measured(
            concurrency=options.concurrency,
            temperature=options.temperature,
            prompts=options.source,
            prompt_count=outcome.prompt_count,
            plain_tokens_per_second=round(outcome.results[0].rate, 1),
            tokens_per_second=round(chosen.rate, 1),
            speedup=round(chosen.speedup, 3),
            predicted_speedup=round(finalist.predicted or 0.0, 3),
            tokens_per_step=round(chosen.tokens_per_step, 3),
            acceptance=tuple(round(rate, 3) for rate in best.acceptance) if best else (),
            break_even_batch=max((outcome.break_even_of(m) for m in used), default=0),
            why=(decision(outcome), *advice),
        ),
        costs=KnownCosts(
            batches=outcome.target.batches,
            tokens=outcome.target.curves[0].tokens,
            target=tuple(curve.seconds for curve in outcome.target.curves),
            passes=passes,
        ),
        machine=MachineIdentity.of(llm.target),
    )

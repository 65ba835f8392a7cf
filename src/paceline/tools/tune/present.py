"""An outcome as a report for people, a record for machines, and a profile for engines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.model.identity import ModelIdentity
from paceline.tools.report.document import Figure, Report, Table, Text
from paceline.tools.report.plots import lines
from paceline.tools.tune.advice import advise
from paceline.tools.tune.confirm import PLAIN, Confirmation
from paceline.tools.tune.plan import CALM, TuningOutcome
from paceline.tools.tune.search import batch_sizes, pass_ratio, speedups
from paceline.tuned import (
    VERSION,
    DraftChoice,
    EngineChoice,
    KnownCosts,
    MachineIdentity,
    Measured,
    PassCosts,
    TunedProfile,
)

if TYPE_CHECKING:
    from paceline.llm import LLM

_SHOWN = 4  # methods in the plot


def decision(outcome: TuningOutcome) -> str:
    """What is chosen and why, in one sentence; also while something is missing."""
    chosen = outcome.chosen
    if chosen is None:
        best = next(iter(outcome.settings), None)
        if best is None:
            return "Nothing was measured to the end."
        gain = best.rate / outcome.plain_rate
        return (
            f"Not confirmed: {best.method.label} at length {best.length} is predicted to reach "
            f"{gain:.2f}x plain decoding."
        )
    plain = outcome.results[0]
    if chosen is plain:
        tried = max(outcome.results[1:], key=lambda r: r.speedup, default=None)
        best_was = f"; the best draft reached {tried.speedup:.2f}x" if tried else ""
        return f"Plain decoding: no draft was clearly faster{best_was}."
    return (
        f"{chosen.contestant.name}: {chosen.rate:.0f} tokens/s against {plain.rate:.0f}, "
        f"{chosen.speedup:.2f}x plain decoding, {chosen.tokens_per_step:.2f} tokens a step."
    )


def report_of(outcome: TuningOutcome) -> Report:
    """Sections for what is there: an interrupted run has fewer."""
    options = outcome.options
    report = Report(f"Tuning {outcome.model}")
    settings = outcome.settings
    if settings:
        report.add("Search", *_unrest(outcome), _search_table(outcome), *_left_out(outcome))
    if outcome.results and outcome.results[0].ratios:
        report.add("Confirmed by decoding", _confirmation_table(outcome))
    advice = advise(outcome)
    if advice:
        marks = {True: "agrees", False: "DISAGREES", None: ""}
        rows = [(a.rule, a.measured, a.verdict, marks[a.holds]) for a in advice]
        table = Table(("rule of the field", "measured here", "so", "rule"), rows)
        report.add("Why", table)
    report.add("Choice", Text(decision(outcome), warning=outcome.chosen is None), *_bought(outcome))
    if settings:
        report.add("Pictures", *_figures(outcome, options.concurrency))
    return report


def _search_table(outcome: TuningOutcome) -> Table:
    options = outcome.options
    rows = []
    for setting in outcome.settings:
        method = setting.method
        rows.append(
            (
                method.label,
                setting.length,
                f"{method.mean_acceptance:.2f}",
                f"{setting.tokens_per_step:.2f}",
                f"{setting.seconds * 1e3:.1f}",
                f"{setting.drafting / setting.seconds:.0%}",
                f"{setting.rate:.0f}",
                f"{setting.rate / outcome.plain_rate:.2f}x",
                outcome.break_even_of(method),
            )
        )
    return Table(
        (
            "method",
            "len.",
            "acc.",
            "tok/step",
            "ms",
            "draft",
            "tok/s",
            "speedup",
            "until",
        ),
        rows,
        title=f"Predicted, each method at its best length, {options.concurrency} at once, "
        f"temperature {options.temperature:g}",
        note=f"Plain decoding: {outcome.plain_rate:.0f} tok/s predicted. len.: levels. acc.: share "
        "of tried positions accepted. ms: a step; draft: its share. until: the largest batch that "
        f"gains, sought to {outcome.largest_batch}. {outcome.prompt_count} prompts at hand.",
    )


def _unrest(outcome: TuningOutcome) -> list[Text]:
    if outcome.unrest <= CALM:
        return []
    said = (
        f"The machine was busy: plain steps took up to {outcome.unrest:.1f} times the fastest. "
        "Do not trust these figures; tune again when it is idle."
    )
    return [Text(said, warning=True)]


def _bought(outcome: TuningOutcome) -> list[Text]:
    return [] if outcome.bought is None else [Text(outcome.bought.line)]


def _left_out(outcome: TuningOutcome) -> list[Text]:
    if not outcome.left_out:
        return []
    return [Text("Left out: " + "; ".join(f"{what}: {why}" for what, why in outcome.left_out))]


def _confirmation_table(outcome: TuningOutcome) -> Table:
    rows = []
    plain = outcome.results[0].decoding_rate
    for result in outcome.results:
        contestant = result.contestant
        drafted = contestant.spec == PLAIN or result.drafted or not result.ratios
        rows.append(
            (
                contestant.name,
                contestant.batch,
                f"{result.rate:.0f}",
                f"{result.tokens_per_step:.2f}",
                f"{contestant.predicted:.2f}x",
                f"{result.decoding_rate / max(plain, 1e-9):.2f}x",
                f"{result.speedup:.2f}x" if drafted else "never drafted",
                f"{result.predicted_by_measured(plain):.2f}" if plain else "",
                _spread(result),
            )
        )
    rounds = max(len(result.ratios) for result in outcome.results)
    return Table(
        (
            "contestant",
            "batch",
            "tok/s",
            "tok/step",
            "predicted",
            "decoding",
            "whole",
            "pred./meas.",
            "spread",
        ),
        rows,
        note="All by plain decoding. predicted and decoding: without reading prompts. whole: with "
        f"it, the median of {rounds} rounds in turns; it decides. pred./meas.: predicted by "
        "decoding. Length auto is taken unless a "
        "fixed one beats it by 3 %.",
    )


def _spread(result: Confirmation) -> str:
    if not result.ratios:
        return ""
    return f"{min(result.ratios):.2f} to {max(result.ratios):.2f}"


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
        "search": [
            {
                "method": setting.method.label,
                "spec": setting.method.spec,
                "draft_length": setting.length,
                "batch": setting.batch,
                "acceptance": setting.method.acceptance,
                "reached": setting.method.reached,
                "tokens_per_step": setting.tokens_per_step,
                "step_seconds": {"draft": setting.drafting, "total": setting.seconds},
                "cost_ratio": target and pass_ratio(setting.method, target),
                "predicted_tokens_per_second": setting.rate,
                "predicted_speedup": setting.rate / outcome.plain_rate,
                "break_even_batch": outcome.break_even_of(setting.method),
            }
            for setting in outcome.settings
        ],
        "confirmation": [
            {
                "contestant": result.contestant.name,
                "spec": result.contestant.spec,
                "draft_length": result.contestant.length,
                "batch": result.contestant.batch,
                "tokens_per_second": result.rate,
                "tokens_per_step": result.tokens_per_step,
                "decoding_tokens_per_second": result.decoding_rate,
                "drafted": result.drafted,
                "predicted_speedup": result.contestant.predicted,
                "predicted_by_measured": result.predicted_by_measured(
                    outcome.results[0].decoding_rate
                ),
                "speedup": result.speedup,
                "ratios": result.ratios,
            }
            for result in outcome.results
        ],
        "advice": [asdict(item) for item in advise(outcome)],
        "budget": None if outcome.bought is None else asdict(outcome.bought),
        "left_out": [{"what": what, "why": why} for what, why in outcome.left_out],
    }


def profile_of(outcome: TuningOutcome, llm: LLM) -> TunedProfile:
    """The profile of a confirmed outcome; ``llm`` has the target loaded."""
    chosen = outcome.chosen
    assert chosen is not None and outcome.target is not None
    contestant, options = chosen.contestant, outcome.options
    # Requests that were not expected may join, unless a smaller batch proved faster.
    batch_size = 8 if contestant.batch == options.concurrency else contestant.batch
    used = contestant.methods
    passes = {m.family: PassCosts(m.pass_seconds.tokens, m.pass_seconds.seconds) for m in used}
    best = max(used, key=lambda m: sum(m.survival), default=None)
    advice = [f"{item.rule}: {item.measured}: {item.verdict}" for item in advise(outcome)]
    return TunedProfile(
        version=VERSION,
        model=ModelIdentity.of(llm.target),
        draft=DraftChoice(contestant.spec, contestant.length, contestant.max_length),
        engine=EngineChoice(max(batch_size, contestant.batch), "auto"),
        measured=Measured(
            concurrency=options.concurrency,
            temperature=options.temperature,
            prompts=options.source,
            prompt_count=outcome.prompt_count,
            plain_tokens_per_second=round(outcome.results[0].rate, 1),
            tokens_per_second=round(chosen.rate, 1),
            speedup=round(chosen.speedup, 3),
            predicted_speedup=round(contestant.predicted, 3),
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

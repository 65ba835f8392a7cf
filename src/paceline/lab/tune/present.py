"""A tuning outcome as a report, as JSON, and as tuned settings for engines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

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
from paceline.lab.tune.candidates import PLAIN_CANDIDATE, Confirmation, DrafterTrial
from paceline.lab.tune.plan import TuningOutcome
from paceline.llm import LLM
from paceline.settings import tuned

_NOTES = NOTES["tune"]
_rounded = "{:.0f}".format


def _drafting_share(trial: DrafterTrial) -> str:
    return share(trial.draft_seconds / trial.step_seconds) if trial.step_seconds else ""


_TRIED = (
    Column("method", "method", "candidate.label"),
    Column("spec", "", "candidate.spec"),
    Column("acceptance", "", "run.counts.rates"),
    Column("reached", "", "run.counts.reached_at"),
    Column("acceptance_rate", "accepted", "run.counts.acceptance_rate", share),
    Column("tokens_per_step", "tok/step", "run.tokens_per_step", number),
    Column("step_seconds", "ms", "step_seconds", lambda seconds: f"{seconds * 1e3:.1f}"),
    Column("draft_seconds", "", "draft_seconds"),
    Column("", "draft", "", _drafting_share),
    Column("tokens_per_second", "tok/s", "run.rate", _rounded),
    Column("speedup", "speedup", "speedup", times),
)


def _speedup(result: Confirmation) -> str:
    drafted = result.run.counts.drafted or result.finalist == PLAIN_CANDIDATE
    return times(result.speedup) if drafted else "never drafted"


_CONFIRMED = (
    Column("finalist", "finalist", "finalist.label"),
    Column("spec", "", "finalist.spec"),
    Column("tokens_per_second", "tok/s", "rate", _rounded),
    Column("tokens_per_step", "tok/step", "run.tokens_per_step", number),
    Column("drafted", "", "run.counts.drafted"),
    Column("decoding_tokens_per_second", "", "run.decoding.rate"),
    Column("speedup", "", "speedup"),
    Column("", "speedup", "", _speedup),
    Column("ratios", "spread", shown=lambda ratios: f"{min(ratios):.2f} to {max(ratios):.2f}"),
)


def decision(outcome: TuningOutcome) -> str:
    """The choice and its reason in one sentence, or what was measured so far."""
    chosen, results = outcome.chosen, outcome.results
    drafting = [r for r in results[1:] if r.ratios and r.run.counts.drafted]
    drafting.sort(key=lambda result: -result.speedup)
    shown = ", ".join(f"{r.finalist.label} {r.speedup:.2f}x" for r in drafting)
    if chosen is not None and chosen.finalist != results[0].finalist:
        return (
            f"{chosen.finalist.label}: {chosen.rate:.0f} tokens/s against {results[0].rate:.0f}, "
            f"{chosen.speedup:.2f}x plain decoding, {chosen.run.tokens_per_step:.2f} tokens/step."
        )
    if chosen is not None:
        slower = bool(drafting) and drafting[0].speedup < 1
        why = "all drafts were slower" if slower else "no draft was clearly faster"
        return f"Plain decoding: {why}{f' ({shown})' if shown else ''}."
    if not drafting and outcome.trials:
        best = max(outcome.trials, key=lambda trial: trial.speedup)
        shown = f"{best.candidate.label} {best.speedup:.2f}x in its trial"
    so_far = f"speedups over plain decoding {shown}" if shown else "nothing was measured"
    return f"Not confirmed: {so_far}. Give more --seconds."


def report_of(outcome: TuningOutcome) -> Report:
    """The report; an interrupted run has fewer sections."""
    options, results = outcome.options, outcome.results
    trials = sorted(outcome.trials, key=lambda trial: -trial.speedup)
    report = Report(f"Tuning {outcome.model}")
    if trials:
        how = f"{options.concurrency} at once, temperature {options.temperature:g}"
        title = f"Each drafter compared with plain decoding, {how}"
        table = table_of(trials, _TRIED, _NOTES["tried"].format(outcome), title)
        left_out = "; ".join(f"{what}: {why}" for what, why in outcome.left_out)
        report.add("Search", table, Text(left_out and f"Left out: {left_out}"))
    if results and results[0].ratios:
        note = _NOTES["confirmed"].format(len(results[0].ratios))
        report.add("Confirmed by decoding", table_of(results, _CONFIRMED, note))
    completed = Text("" if outcome.completed is None else outcome.completed.line)
    report.add("Choice", Text(decision(outcome), warning=outcome.chosen is None), completed)
    return report


def tuning_record(outcome: TuningOutcome) -> dict[str, Any]:
    return {
        "model": outcome.model,
        **asdict(outcome.options),
        "prompts": outcome.prompt_count,
        "decision": decision(outcome),
        "confirmed": outcome.chosen is not None,
        "search": [record_of(trial, _TRIED) for trial in outcome.trials],
        "confirmation": [record_of(result, _CONFIRMED) for result in outcome.results],
        "budget": outcome.completed and asdict(outcome.completed),
        "left_out": [{"what": what, "why": why} for what, why in outcome.left_out],
    }


def tuned_settings(outcome: TuningOutcome, llm: LLM) -> tuned.TunedSettings:
    """The settings of a confirmed outcome; ``llm`` has the target loaded."""
    assert outcome.chosen is not None
    return tuned.TunedSettings(
        version=tuned.VERSION,
        model=tuned.ModelIdentity.of(llm.target),
        draft=tuned.DraftChoice(outcome.chosen.finalist.spec, "auto"),
        engine=tuned.EngineChoice(outcome.batch),
        why=decision(outcome),
    )

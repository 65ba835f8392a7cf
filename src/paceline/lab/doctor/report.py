"""Findings and figures, once, for the screen, reports and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.costs import TargetCosts
from paceline.lab.doctor.findings import ERROR, OK, WARNING, Finding
from paceline.lab.doctor.trial import VERDICTS, SpeedupTrial
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

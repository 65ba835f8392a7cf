"""Findings and figures as one report and one record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.lab.doctor.findings import ERROR, OK, WARNING, Finding
from paceline.lab.doctor.trial import LONG, VERDICTS, SpeedupTrial
from paceline.lab.report import plots
from paceline.lab.report.document import Figure, Report, Table, Text


def record(
    target: str, draft: str | None, findings: Sequence[Finding], trial: SpeedupTrial | None
) -> dict[str, Any]:
    """Plain data for JSON."""
    return {
        "model": target,
        "draft": draft,
        "errors": sum(item.severity is ERROR for item in findings),
        "warnings": sum(item.severity is WARNING for item in findings),
        "findings": [item.record() for item in findings],
        "run": None if trial is None else trial.record(),
    }


def report_of(
    target: str, draft: str | None, findings: Sequence[Finding], trial: SpeedupTrial | None
) -> Report:
    """What to look at first, then what was measured, then what is in order."""
    document = Report(f"{target} with {draft or 'no draft'}")
    bad = [item for item in findings if item.severity is not OK]
    if bad:
        rows = [
            (item.severity.value, item.about, item.found, item.consequence, item.cure)
            for item in bad
        ]
        columns = ("", "about", "found", "consequence", "cure")
        document.add("Findings", Table(columns, rows), _count(findings))
    if trial is not None:
        verdict = [f for f in findings if f.code in VERDICTS]
        words = [Text(f"{f.code.replace('-', ' ')}: {f.found}") for f in verdict]
        document.add("Measured", *words, *_measured(trial))
    fine = [
        (item.about, item.found)
        for item in findings
        if item.severity is OK and item.code not in VERDICTS
    ]
    if fine:
        document.add("In order", Table(("about", "found"), fine))
    return document


def _count(findings: Sequence[Finding]) -> Text:
    errors = sum(item.severity is ERROR for item in findings)
    warnings = sum(item.severity is WARNING for item in findings)
    counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return Text(counts, warning=errors > 0)


def _measured(trial: SpeedupTrial) -> list[Table | Figure]:
    explored = trial.explored
    ratio, textbook = explored.cost_ratio, explored.textbook
    tried = sum(explored.long.reached)
    rows: list[tuple[str, str]] = [
        ("plain decoding", f"{explored.plain.rate:.0f} tokens/s"),
        ("acceptance rate", explored.accepted + (f" of {tried} tried" if tried else "")),
        ("draft pass / target forward", "none" if ratio is None else f"{ratio:.2f}"),
    ]
    base = explored.target(1)
    for rows_computed, seconds in zip(
        explored.target.tokens[1:], explored.target.seconds[1:], strict=True
    ):
        rows.append((f"forward over {rows_computed:.1f} rows / 1 row", f"{seconds / base:.2f}"))
    rows.append(("best draft length", str(explored.best)))
    rows.append(("predicted speedup", f"{explored.speedup(explored.best):.2f}x"))
    if textbook is not None:
        rows.append(("textbook formula", f"{textbook:.2f}x"))
    rows.append(("measured speedup", f"{trial.measured:.2f}x"))
    rows.append(("predicted / measured", f"{trial.predicted_by_measured:.2f}"))
    note = (
        f"{trial.seconds:.0f} s, one greedy sequence at a time on shipped prompts; prompts are not "
        "timed. The textbook formula takes checking a draft to be free."
    )
    lengths = list(range(1, LONG + 1))
    measured = [trial.measured if length == explored.best else None for length in lengths]
    series = {"predicted": explored.predicted, "measured": measured}
    figure = Figure(
        "Speedup over plain decoding by draft length",
        lambda: plots.lines(lengths, series, "draft length", "speedup"),
        "speedup",
    )
    return [Table(("figure", "value"), rows, note=note), figure]

"""Findings of the doctor. Their kinds are the tables of ``kinds.md``, which docs/guides/doctor.md
repeats; a check names the kind and gives the values for its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.lab.report.document import Column, Report, Table, Text, record_of, table_of


class Severity(str, Enum):
    """ERROR: it will not run, or not correctly. WARNING: it will run, but slowly."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


ERROR, WARNING, NOTE, OK = Severity


@dataclass(frozen=True)
class Kind:
    """A kind of finding, ``about`` a "model", the "pair" or the "machine". ``severities``: the
    possible ones, the usual one first. ``says``: a format string for the text."""

    about: str
    severities: tuple[Severity, ...]
    says: str
    consequence: str = ""
    cure: str = ""


def _parse_tables(text: str) -> Iterator[tuple[str, Kind]]:
    """Parse the tables: rows of problems, and shorter rows of kinds that are in order (OK)."""
    for line in text.splitlines():
        if line.startswith("| `"):
            code, about, *cells = line.strip("| ").split(" | ")
            severities, says, *advice = cells if cells[1:] else (OK.value, *cells)
            parsed = tuple(map(Severity, severities.split(", ")))
            yield code.strip("`"), Kind(about, parsed, says, *advice)


KINDS: Mapping[str, Kind] = dict(
    _parse_tables(Path(__file__).with_name("kinds.md").read_text(encoding="utf-8"))
)


@dataclass(frozen=True)
class Finding:
    """``about``: "target", "draft", "pair" or "machine"; checks that apply to both models say
    "model", which ``findings_of`` replaces. ``text``: what was found."""

    code: str
    severity: Severity
    about: str
    text: str
    consequence: str
    cure: str


def finding(
    code: str,
    text: str | None = None,
    cure: str | None = None,
    *,
    severity: Severity | None = None,
    about: str | None = None,
    **values: object,
) -> Finding:
    """A finding of a kind in ``KINDS``. Its text is ``text`` or, by default, the kind's format with
    ``values``. ``severity``, ``about`` and ``cure`` replace those of the kind."""
    kind = KINDS[code]
    chosen = kind.severities[0] if severity is None else severity
    assert chosen in kind.severities, f"{code} is never of severity {chosen.value}"
    text = kind.says.format(**values) if text is None else text
    cure = kind.cure if cure is None else cure
    return Finding(code, chosen, about or kind.about, text, kind.consequence, cure)


def refusal(code: str, error: Exception) -> Finding:
    """A finding from an error's message: the part after the last semicolon is the cure."""
    what, semicolon, cure = str(error).rpartition("; ")
    if not semicolon:
        return finding(code, cure)
    return finding(code, what, f"{cure[:1].upper()}{cure[1:]}.")


def findings_of(model: str, findings: Iterable[Finding]) -> list[Finding]:
    """The findings, with "model" replaced by the name of this ``model``."""
    return [replace(f, about=model) if f.about == "model" else f for f in findings]


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort by severity, the worst first, then in the order of ``KINDS``."""
    severities, codes = list(Severity), list(KINDS)
    return sorted(findings, key=lambda f: (severities.index(f.severity), codes.index(f.code)))


_COLUMNS = (
    Column("severity", " ", "severity.value"),
    Column("about", "about"),
    Column("found", "found", "text"),
    *(Column(key, key) for key in ("consequence", "cure")),
    Column("code"),
)


def record(target: str, draft: str | None, findings: Sequence[Finding]) -> dict[str, Any]:
    return {
        "model": target,
        "draft": draft,
        "errors": sum(item.severity is ERROR for item in findings),
        "warnings": sum(item.severity is WARNING for item in findings),
        "findings": [record_of(item, _COLUMNS) for item in findings],
    }


def report_of(target: str, draft: str | None, findings: Sequence[Finding]) -> Report:
    """The report: problems and notes first, then what is in order."""
    document = Report(f"{target} with {draft or 'no draft'}")
    if bad := [item for item in findings if item.severity is not OK]:
        errors, warnings = (sum(f.severity is s for f in bad) for s in (ERROR, WARNING))
        counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        document.add("Findings", table_of(bad, _COLUMNS), Text(counts, warning=errors > 0))
    rows = [(item.about, item.text) for item in findings if item.severity is OK]
    document.add("In order", Table(("about", "found"), rows))
    return document

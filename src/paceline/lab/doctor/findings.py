"""Findings: of which kind, about what, and what was seen. The kinds are the tables of ``kinds.md``,
which docs/guides/doctor.md repeats. A check names the kind and gives the values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.lab.report.document import Column, Report, Table, Text, record_of, table_of


class Severity(str, Enum):
    """error: it will not run, or not run right. warning: it will run, but slowly."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


ERROR, WARNING, NOTE, OK = Severity


@dataclass(frozen=True)
class Kind:
    """One thing that may be seen, ``about`` a "model", the "pair" or the "machine".
    ``severities``: the usual one first. ``says``: a format."""

    about: str
    severities: tuple[Severity, ...]
    says: str
    consequence: str = ""
    cure: str = ""


def _read(text: str) -> Iterator[tuple[str, Kind]]:
    """A row for everything that may be wrong, then a shorter one for all that is in order."""
    for line in text.splitlines():
        if line.startswith("| `"):
            code, about, *cells = line.strip("| ").split(" | ")
            severities, says, *advice = cells if cells[1:] else (OK.value, *cells)
            parsed = tuple(map(Severity, severities.split(", ")))
            yield code.strip("`"), Kind(about, parsed, says, *advice)


KINDS: Mapping[str, Kind] = dict(
    _read(Path(__file__).with_name("kinds.md").read_text(encoding="utf-8"))
)


@dataclass(frozen=True)
class Finding:
    """``about``: "target", "draft", "pair" or "machine", in a check of a model "model". ``text``:
    what was seen."""

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
    """Of a kind in ``KINDS``; it says ``text`` or, with these ``values``, what the kind says.
    ``cure`` replaces the kind's."""
    kind = KINDS[code]
    chosen = kind.severities[0] if severity is None else severity
    assert chosen in kind.severities, f"{code} is never of severity {chosen.value}"
    text = kind.says.format(**values) if text is None else text
    cure = kind.cure if cure is None else cure
    return Finding(code, chosen, about or kind.about, text, kind.consequence, cure)


def refusal(code: str, error: Exception) -> Finding:
    """An error's message: what is wrong, and what to do about it if it says so."""
    what, semicolon, cure = str(error).rpartition("; ")
    if not semicolon:
        return finding(code, cure)
    return finding(code, what, f"{cure[:1].upper()}{cure[1:]}.")


def findings_of(model: str, findings: Iterable[Finding]) -> list[Finding]:
    """With this ``model`` named in those about one."""
    return [replace(f, about=model) if f.about == "model" else f for f in findings]


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; those of one severity in the order of ``KINDS``."""
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
    """What to look at first, then what is in order."""
    document = Report(f"{target} with {draft or 'no draft'}")
    if bad := [item for item in findings if item.severity is not OK]:
        errors, warnings = (sum(f.severity is s for f in bad) for s in (ERROR, WARNING))
        counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        document.add("Findings", table_of(bad, _COLUMNS), Text(counts, warning=errors > 0))
    if fine := [item for item in findings if item.severity is OK]:
        rows = [(item.about, item.text) for item in fine]
        document.add("In order", Table(("about", "found"), rows))
    return document

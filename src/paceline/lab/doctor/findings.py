"""Findings: of which kind, of whom, and what was seen.

The kinds, with their consequences and cures, are the tables of ``kinds.md``; docs/doctor.md repeats
that file word for word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Severity(str, Enum):
    """error: it will not run, or not run right. warning: it will run, but slowly."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"


ERROR, WARNING, NOTE, OK = Severity


@dataclass(frozen=True)
class Kind:
    """One thing that may be found. ``severities``: the usual one first."""

    severities: tuple[Severity, ...]
    consequence: str = ""
    cure: str = ""


def _read(text: str) -> Iterator[tuple[str, Kind]]:
    """A row for everything that may be wrong; behind them the names of what is in order."""
    tables, _, fine = text.partition("### In order")
    for line in tables.splitlines():
        if line.startswith("| `"):
            code, severities, consequence, cure = line.strip("| ").split(" | ")
            parsed = tuple(map(Severity, severities.split(", ")))
            yield code.strip("`"), Kind(parsed, consequence, cure)
    for code in re.findall(r"`([a-z0-9-]+)`", fine):
        yield code, Kind((OK,))


KINDS: Mapping[str, Kind] = dict(
    _read(Path(__file__).with_name("kinds.md").read_text(encoding="utf-8"))
)


@dataclass(frozen=True)
class Finding:
    """``about`` is "target", "draft", "pair" or "machine"; ``found`` names what was seen."""

    code: str
    severity: Severity
    about: str
    found: str
    consequence: str
    cure: str


def finding(
    code: str, about: str, found: str, severity: Severity | None = None, cure: str | None = None
) -> Finding:
    """A finding of a kind in ``KINDS``; ``cure`` replaces the general one by a precise one."""
    kind = KINDS[code]
    chosen = kind.severities[0] if severity is None else severity
    assert chosen in kind.severities, f"{code} is never of severity {chosen.value}"
    return Finding(
        code, chosen, about, found, kind.consequence, kind.cure if cure is None else cure
    )


def parted(error: Exception) -> tuple[str, str | None]:
    """An error's message as what is wrong, and what to do about it if it says so."""
    what, semicolon, cure = str(error).rpartition("; ")
    return (what, f"{cure[:1].upper()}{cure[1:]}.") if semicolon else (cure, None)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; those of one severity in the order of ``KINDS``."""
    order = list(Severity)
    order_of = {code: number for number, code in enumerate(KINDS)}
    return sorted(findings, key=lambda item: (order.index(item.severity), order_of[item.code]))

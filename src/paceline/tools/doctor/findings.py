"""Findings: of which kind, of whom, and what was seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from paceline.tools.doctor.kinds import KINDS, Severity


@dataclass(frozen=True)
class Finding:
    """``about`` is "target", "draft", "pair" or "machine"; ``found`` names what was seen."""

    code: str
    severity: Severity
    about: str
    found: str
    consequence: str
    cure: str

    def record(self) -> dict[str, str]:
        return {**asdict(self), "severity": self.severity.value}


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
    found, semicolon, cure = str(error).rpartition("; ")
    return (found, f"{cure[:1].upper()}{cure[1:]}.") if semicolon else (cure, None)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first; those of one severity in the order of ``KINDS``."""
    order = list(Severity)
    place = {code: number for number, code in enumerate(KINDS)}
    return sorted(findings, key=lambda item: (order.index(item.severity), place[item.code]))

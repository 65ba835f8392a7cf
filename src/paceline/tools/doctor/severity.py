"""How bad a finding is, and what a kind of finding is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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

    area: str
    severities: tuple[Severity, ...]
    consequence: str = ""
    cure: str = ""

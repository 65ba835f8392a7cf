"""All kinds of findings, with their consequences and cures, out of the tables of ``kinds.md``.

docs/doctor.md repeats that file word for word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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
            found = tuple(map(Severity, severities.split(", ")))
            yield code.strip("`"), Kind(found, consequence, cure)
    for code in re.findall(r"`([a-z0-9-]+)`", fine):
        yield code, Kind((OK,))


KINDS: Mapping[str, Kind] = dict(
    _read(Path(__file__).with_name("kinds.md").read_text(encoding="utf-8"))
)

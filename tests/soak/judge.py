"""What a soak counts and what it complains about."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak.answers import Answer
from soak.processes import Held, grown
from soak.requests import ClientRequest

SHOWN = 40  # findings
_LONGEST = 1200  # characters of a request in a finding


@dataclass
class Judge:
    """Collects answers; every line of ``findings`` is a fault of the server."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seen: dict[int, list[tuple[Answer, dict[str, Any]]]] = field(default_factory=dict)
    tokens: int = 0  # that were compared
    say: Callable[[str], None] = lambda line: None  # is told every finding at once

    def complain(self, what: str, request: Any = None) -> None:
        self.counts["findings"] += 1
        shown = "" if request is None else f" -- request: {_short(request)}"
        self.findings.append(f"{what}{shown}")
        if len(self.findings) <= SHOWN:
            self.say(f"FINDING {self.findings[-1]}")

    def expect(self, kind: str, status: int, wanted: set[int], request: Any) -> bool:
        """Whether the status is one that may answer. A full queue may answer anything."""
        if status == 429:
            self.counts["queue full"] += 1
            return False
        self.counts[kind] += 1
        if status not in wanted:
            allowed = "/".join(map(str, sorted(wanted)))
            self.complain(f"{kind}: status {status}, not {allowed}", request)
        return status in wanted

    def answered(self, asked: ClientRequest, answer: Answer, body: dict[str, Any]) -> None:
        """An answer to a request, asked for by ``body``. Equal ones are kept once."""
        known = self.seen.setdefault(asked.key, [])
        if not any(answer.difference(other) is None for other, _ in known):
            known.append((answer, body))

    def compare(self, asked: ClientRequest, alone: Answer) -> None:
        """All answers to a request against that of the same request alone and without drafts."""
        for answer, body in self.seen.pop(asked.key, []):
            self.counts["distinct answers compared"] += 1
            self.tokens += alone.tokens
            found = answer.difference(alone)
            if found:
                self.complain(f"another answer than alone: {found}", {asked.path: body})

    def settled(self, usage: float) -> None:
        """The idle server after a round; ``usage`` is the share of cache blocks in use."""
        if usage != 0:
            self.complain(f"{usage:.1%} of the cache blocks are in use though nothing runs")

    def flat(self, rounds: Sequence[Held]) -> None:
        """What the idle server held after each round."""
        for found in grown(rounds) if rounds else ():
            self.complain(f"not flat: {found}")


def _short(request: Any) -> str:
    text = request if isinstance(request, str) else json.dumps(request)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"

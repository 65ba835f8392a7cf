"""Texts compared with plain decoding's, token for token: counts and differences, and their
tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.lab.certify.certificate import Problem, ResultTable
from paceline.lab.certify.decoding import Difference
from paceline.lab.report.document import NOTES, Column


@dataclass
class TextCheck:
    """Texts of a kind compared with plain decoding under one setting. ``tokens``: how many are
    equal, up to the first difference of each text."""

    kind: str  # "greedy" or "seeded"
    setting: str
    texts: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    ties: int = 0
    bugs: int = 0


@dataclass(frozen=True)
class Divergence:
    """Where a ``text`` differs first from plain decoding's, with both tokens as text. ``is_bug``:
    rounding does not explain it."""

    kind: str
    setting: str
    text: str
    plain: str
    speculative: str
    difference: Difference
    is_bug: bool

    @property
    def problem(self) -> Problem:
        diff = self.difference
        tokens = f"is {self.speculative!r}, with plain decoding {self.plain!r}"
        why = f"their scores differ by {diff.gap:.3g}, which is more than rounding does"
        return Problem(
            self.kind, f"BUG: {self.setting}: {self.text}: token {diff.at} {tokens}: {why}"
        )


_CHECKS = (
    Column("kind", "requests"),
    *(Column(name, name) for name in ("setting", "texts", "tokens", "drafted", "accepted", "ties")),
    Column("bugs", "BUGS"),
)
_DIVERGENCES = (
    Column("kind", "requests"),
    Column("setting", "setting"),
    Column("text", "text"),
    Column("at", "token", "difference.at"),
    Column("plain", "plain", shown=repr),
    Column("speculative", "spec.", shown=repr),
    Column("gap", "gap", "difference.gap", "{:.3g}".format),
    Column("rounding", "rounding", "difference.rounding", "{:.3g}".format),
    Column("is_bug", "class", shown={True: "BUG", False: "tie"}.__getitem__),
)


def text_tables(
    checks: Iterable[TextCheck], divergences: Sequence[Divergence]
) -> tuple[ResultTable, ResultTable]:
    notes, where = NOTES["certify"], "Where texts differ, re-scored"
    compared = [check for check in checks if check.texts]
    return (
        ResultTable("texts", "Token for token", _CHECKS, compared, notes["texts"]),
        ResultTable("divergences", where, _DIVERGENCES, divergences, notes["divergences"]),
    )

"""What a certification has seen so far: plain data that a later run can go on from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.lab.certify.certificate import TESTS, DistributionTest, Problem, ResultTable
from paceline.lab.certify.decoding import Start, String
from paceline.lab.certify.difference import Difference
from paceline.lab.certify.draws import DrawCounts
from paceline.lab.certify.exact import ExactCheck
from paceline.lab.report.columns import Column, record_of

_MOST_DIVERGENCES = 12  # in a report


@dataclass(frozen=True)
class TextDivergence:
    """Where a text leaves the plain one, re-scored; both tokens spelt out."""

    text: str
    plain: str
    speculative: str
    difference: Difference


@dataclass(frozen=True)
class TextCheck:
    """Texts of a kind under one setting against plain decoding. ``ties``: differences that rounding
    explains; the comparison went on from the plain text. ``bugs``: differences that it does not
    explain; the rest of such a text is not compared."""

    kind: str  # "greedy" or "seeded"
    setting: str
    texts: int
    tokens: int
    drafted: int
    accepted: int
    ties: tuple[TextDivergence, ...]
    bugs: tuple[TextDivergence, ...]

    def __add__(self, other: TextCheck) -> TextCheck:
        names = ("texts", "tokens", "drafted", "accepted", "ties", "bugs")
        both = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, **both)

    def problem(self, bug: TextDivergence) -> Problem:
        difference = bug.difference
        where = f"BUG: {self.setting}: {bug.text}: token {difference.at}"
        if difference.scores is None:
            return Problem(self.kind, f"{where}: one text ends where the other goes on")
        what = f"is {bug.speculative!r}, plain decoding's {bug.plain!r}"
        why = f"{difference.gap:.3g} apart, rounding moves them by {difference.step:.2g}"
        return Problem(self.kind, f"{where} {what}: their scores are {why}")


@dataclass
class Prefix:
    """Where continuations are drawn, and those drawn there: with drafts of ``length``, plainly.
    ``portions`` were begun of either kind, so that no two are drawn with the same random
    numbers."""

    start: Start
    length: int
    drawn: list[String] = field(default_factory=list)
    plain: list[String] = field(default_factory=list)
    portions: int = 0
    drafted: int = 0


@dataclass
class Evidence:
    """``done``: the pieces of work that are in it, by name. ``plain``: plain decoding's texts.

    ``tranche``: how many times over the effort is wanted by now. ``verdicts``: how many were given
    on it: the more often somebody goes on after one, the easier the next would be wrong.
    ``tokens`` of each text; 0 until that is decided. ``draws``: the drafter's.
    """

    tranche: int = 1
    tokens: int = 0
    verdicts: int = 0
    spent: float = 0.0
    plain: dict[str, String] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    checks: list[TextCheck] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    exact: list[ExactCheck] = field(default_factory=list)
    draws: DrawCounts = field(default_factory=DrawCounts)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, check: TextCheck) -> None:
        """To what was seen of the same requests under the same setting."""
        self.problems += map(check.problem, check.bugs)
        for index, old in enumerate(self.checks):
            if (old.kind, old.setting) == (check.kind, check.setting):
                self.checks[index] = old + check
                return
        self.checks.append(check)

    def tables(self, tests: Sequence[DistributionTest]) -> Iterator[ResultTable]:
        """With the ``tests`` of what was drawn. Bugs come first; the same difference under several
        settings once."""
        yield replace(_TEXTS, rows=tuple(self.checks))
        listed = {item for check in self.checks for item in (*check.bugs, *check.ties)}
        rows = sorted(listed, key=lambda item: (item.difference.is_tie, item.text))
        yield replace(_DIVERGENCES, rows=rows[:_MOST_DIVERGENCES])
        yield replace(TESTS, rows=tests)
        yield replace(_EXACT, rows=tuple(self.exact))


def _class(difference: Difference) -> str:
    if difference.on_edge:
        return "tie (edge of the truncation)"
    return "tie" if difference.is_tie else "BUG"


_DIVERGENCES = ResultTable(
    "",
    "Where texts part, re-scored",
    (
        Column("text", "text"),
        Column("at", "token", "difference.at"),
        Column("plain", "plain", shown=repr),
        Column("speculative", "spec.", shown=repr),
        Column("plain_id", "", "difference.left"),
        Column("speculative_id", "", "difference.right"),
        Column("scores", "scores", "difference.scores", lambda s: f"{s[0]:.4g} / {s[1]:.4g}"),
        Column(  # infinite gaps are null
            *("gap", "gap", "difference.gap", "{:.3g}".format),
            lambda gap: gap if math.isfinite(gap) else None,
        ),
        Column("rounding_step", "step", "difference.step", "{:.2g}".format),
        Column("rounding_spread", "shape", "difference.spread", "{:.2g}".format),
        Column("on_edge", "", "difference.on_edge"),
        Column("", "class", "difference", _class),
    ),
    "step: the rounding step of these logits. shape: how far other batch shapes move them. A tie "
    f"is a gap of at most twice the greater move. At most {_MOST_DIVERGENCES}; all are in --json.",
)


def _records(items: Sequence[TextDivergence]) -> list[object]:
    return [record_of(item, _DIVERGENCES.columns) for item in items]


_TEXTS = ResultTable(
    "texts",
    "Token for token",
    (
        Column("kind", "requests"),
        *(Column(name, name) for name in ("setting", "texts", "tokens", "drafted", "accepted")),
        Column("ties", "ties", None, len, _records),
        Column("bugs", "BUGS", None, len, _records),
    ),
    "Against plain decoding one by one. After a tie the comparison goes on from plain's.",
)
_EXACT = ResultTable(
    "exact",
    "The rule, enumerated",
    (
        Column("prefix", "prefix"),
        Column("", "draft", "", lambda c: f"{c.nodes} nodes, {c.draw.replace('_', ' ')}"),
        Column("draw"),
        Column("nodes"),
        Column("tokens", "tokens"),
        Column("vocabulary", "vocabulary"),
        Column("whole", "all of it"),
        Column("outcomes", "outcomes"),
        Column("distance", "distance", shown="{:.1e}".format),
        Column("passed"),
    ),
    "Every draft and every decision of one step through the verifier in use, over the real "
    "distributions of some likely tokens. distance: total variation from the target's one of as "
    "many tokens.",
)

"""What a certification has seen so far: plain data that a later run can go on from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.lab.certify.cells import String
from paceline.lab.certify.decoding import Start
from paceline.lab.certify.exact import ExactCheck
from paceline.lab.difference import Difference


@dataclass(frozen=True)
class Problem:
    """Something wrong: in which part, and what, in one line."""

    part: str
    what: str


@dataclass(frozen=True)
class TaskDivergence:
    """Where the text of a task leaves the plain one, re-scored; both tokens spelt out."""

    task: str
    plain: str
    speculative: str
    difference: Difference


@dataclass(frozen=True)
class TextCheck:
    """All tasks under one setting against plain decoding.

    ``ties``: differences that rounding explains. After each the comparison went on from the plain
    text, so a later bug is not hidden behind it. ``bugs``: differences that it does not explain;
    the rest of such a text is not looked at.
    """

    kind: str  # "greedy" or "seeded"
    setting: str
    texts: int
    tokens: int
    drafted: int
    accepted: int
    ties: tuple[TaskDivergence, ...]
    bugs: tuple[TaskDivergence, ...]

    def __add__(self, other: TextCheck) -> TextCheck:
        names = ("texts", "tokens", "drafted", "accepted", "ties", "bugs")
        both = {name: getattr(self, name) + getattr(other, name) for name in names}
        return replace(self, **both)

    def problems(self) -> list[Problem]:
        """The bugs, in words."""
        return [self._problem(item) for item in self.bugs]

    def _problem(self, item: TaskDivergence) -> Problem:
        difference = item.difference
        where = f"{self.setting}: {item.task}: token {difference.at}"
        what = f"is {item.speculative!r}, plain decoding's {item.plain!r}"
        if difference.scores is None:
            return Problem(self.kind, f"BUG: {where}: one text ends where the other goes on")
        gap, step = difference.gap, difference.step
        why = f"their scores are {gap:.3g} apart, rounding moves them by {step:.2g}"
        return Problem(self.kind, f"BUG: {where} {what}: {why}")


@dataclass
class Prefix:
    """Where continuations are drawn, and those drawn there: with drafts of ``length``, plainly.

    ``text`` is the number of the prompt that it lies in. ``portions`` were begun of either kind,
    so that no two are drawn with the same random numbers.
    """

    name: str
    text: int
    start: Start
    length: int
    drawn: list[String] = field(default_factory=list)
    plain: list[String] = field(default_factory=list)
    portions: int = 0
    drafted: int = 0


@dataclass
class Evidence:
    """``done``: the pieces of work that are in it, by name. ``plain``: plain decoding's texts.

    ``tranche``: how many times over the effort is wanted by now. ``looks``: how often a verdict
    was drawn from it: the more often somebody looks and goes on, the easier one would be wrong.
    ``tokens`` of each text; 0 until that is decided. ``draws``: of the drafter, by their
    position in its declared distribution; ``impossible`` ones had none.
    """

    tranche: int = 1
    tokens: int = 0
    looks: int = 0
    spent: float = 0.0
    plain: dict[str, tuple[int, ...]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    checks: list[TextCheck] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    exact: list[ExactCheck] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    impossible: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, check: TextCheck) -> None:
        """To what was seen of the same requests under the same setting."""
        self.problems += check.problems()
        for index, old in enumerate(self.checks):
            if (old.kind, old.setting) == (check.kind, check.setting):
                self.checks[index] = old + check
                return
        self.checks.append(check)

    def drafted(self, kind: str) -> int:
        return sum(check.drafted for check in self.checks if check.kind == kind)

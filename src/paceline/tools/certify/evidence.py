"""What a certification has seen so far: plain data that a later run can go on from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from paceline.tools.certify.cells import String
from paceline.tools.certify.decoding import Start
from paceline.tools.certify.exact import ExactCheck
from paceline.tools.certify.findings import Problem
from paceline.tools.certify.texts import TextCheck


@dataclass
class Place:
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
    ``tokens`` of each text; 0 until that is decided. ``draws``: of the drafter, by their place in
    its declared distribution; ``impossible`` ones had none.
    """

    tranche: int = 1
    tokens: int = 0
    looks: int = 0
    spent: float = 0.0
    plain: dict[str, tuple[int, ...]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    checks: list[TextCheck] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    exact: list[ExactCheck] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    impossible: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, check: TextCheck) -> None:
        """To what was seen of the same requests under the same setting."""
        for place, old in enumerate(self.checks):
            if (old.kind, old.setting) == (check.kind, check.setting):
                self.checks[place] = _joined(old, check)
                return
        self.checks.append(check)

    def drafted(self, kind: str) -> int:
        return sum(check.drafted for check in self.checks if check.kind == kind)


def _joined(old: TextCheck, new: TextCheck) -> TextCheck:
    return replace(
        old,
        texts=old.texts + new.texts,
        tokens=old.tokens + new.tokens,
        drafted=old.drafted + new.drafted,
        accepted=old.accepted + new.accepted,
        ties=(*old.ties, *new.ties),
        bugs=(*old.bugs, *new.bugs),
    )

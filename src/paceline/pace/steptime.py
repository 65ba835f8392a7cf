"""What a step takes: start-up's measurements, corrected by what steps took since."""

from __future__ import annotations

from collections.abc import Hashable

from paceline.core.costs import StepCosts
from paceline.pace.correction import Correction, cell_of

_LONG_AGO = 64  # steps
_PLAIN_FIRST = 3  # steps without drafts at every concurrency
_PASSES = 0.05**2  # of passes of a draft: their times differ little by how many there are


class StepTime:
    """Predicts the seconds of a step, and learns from each step where that is wrong.

    A step is drafting (passes of a drafter, or looking something up) and the rest: the target's
    forward over its sequences and their draft nodes, and the host's work. Both are predicted from
    forwards measured at start-up and corrected by concurrency (in powers of two) and nodes.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._known: dict[tuple[int, float], float] = {}
        self._rest = Correction()
        self._passes: dict[Hashable, Correction] = {}
        self._handling: dict[Hashable, float] = {}  # seconds a sequence, where no pass is taken
        self._kinds: set[Hashable] = set()  # of the drafts in the step under way
        self._drafting = 0.0  # seconds of their passes, as measured
        self._since_plain = _LONG_AGO  # steps since one without drafts
        self._whole = False  # whether only the whole of steps is known

    def verify(self, batch: int, nodes: float) -> float:
        """A target forward over ``batch`` sequences and ``nodes`` draft nodes each, as measured."""
        key = (batch, round(nodes, 1))
        if key not in self._known:
            if len(self._known) > 4096:
                self._known.clear()
            self._known[key] = self._costs.target(batch, 1 + key[1])
        return self._known[key]

    def rest(self, batch: int, nodes: float, even: bool = True) -> float:
        """All of a step but the drafting; ``even`` if all sequences have as many nodes."""
        return self.verify(batch, nodes) * self._rest.factor(group_of(batch), cell_of(nodes, even))

    def drafting(
        self, batch: int, nodes: float, seconds: float, kind: Hashable, even: bool = True
    ) -> float:
        """Drafting of ``nodes`` each for ``batch`` sequences, by passes measured to ``seconds``."""
        if not seconds:
            return self._handling.get(kind, 0.0) * batch if nodes else 0.0
        own = self._passes.get(kind)
        if own is None:
            return seconds
        return seconds * own.factor(group_of(batch), cell_of(nodes, even))

    def step(self, batch: int, nodes: float, drafting: float, kind: Hashable = None) -> float:
        """A step of ``batch`` sequences that verify ``nodes`` each after ``drafting`` seconds.

        ``drafting`` is as measured at start-up, of a drafter of this ``kind``.
        """
        return self.rest(batch, nodes) + self.drafting(batch, nodes, drafting, kind)

    def wants_plain(self, batch: int) -> bool:
        """Whether a step without drafts is needed to tell drafting from the rest.

        At a concurrency that is new, some: what drafts cost there is told against them.
        """
        if self._rest.seen(group_of(batch), 0) < _PLAIN_FIRST:
            return True
        return self._since_plain >= (_LONG_AGO if self._whole else 4 * _LONG_AGO)

    def begin(self, kind: Hashable, drafting: float) -> None:
        """Drafts of a kind are made in the step under way; passes measured to take so long."""
        self._kinds.add(kind)
        self._drafting += drafting

    def end(
        self,
        batch: int,
        nodes: int,
        seconds: float | None,
        drafting: float | None = None,
        even: bool = True,
    ) -> None:
        """The step is over: ``nodes`` were verified for ``batch`` sequences, ``even`` if alike.

        ``seconds`` is None if the step is no measure (it prefilled, too). ``drafting`` is the part
        of them that went into drafting; None if only the whole is known.
        """
        if seconds is not None and batch:
            self._learn(batch, nodes / batch, seconds, drafting, even)
        self._kinds.clear()
        self._drafting = 0.0

    def _learn(
        self, batch: int, nodes: float, seconds: float, drafting: float | None, even: bool
    ) -> None:
        kind = next(iter(self._kinds)) if len(self._kinds) == 1 else None
        group, cell = group_of(batch), cell_of(nodes, even)
        known = self.rest(batch, nodes, even)
        self._since_plain = self._since_plain + 1 if self._kinds else 0
        self._whole = drafting is None and bool(self._kinds)
        if drafting is None:
            # Where plain steps say what the rest takes, drafting answers for what is left. Else
            # all may have become slower, and both are as wrong as the whole.
            expected = self.drafting(batch, nodes, self._drafting, kind, even)
            whole = seconds * expected / (known + expected)
            drafting = max(seconds - known, 0.0) if self._since_plain < _LONG_AGO else whole
        rest = seconds - drafting if self._kinds else seconds
        self._rest.observe(group, cell, rest / self.verify(batch, nodes))
        if len(self._kinds) != 1:
            return
        if self._drafting:
            own = self._passes.setdefault(kind, Correction(_PASSES))
            own.observe(group, cell, drafting / self._drafting)
        else:
            before = self._handling.get(kind, 0.0)
            each = min(drafting, known) / batch
            self._handling[kind] = before + 0.05 * (each - before)


def group_of(batch: int) -> int:
    """Powers of two: 1, 2 and 3, 4 to 7, ..."""
    return batch.bit_length()

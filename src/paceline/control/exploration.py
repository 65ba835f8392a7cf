"""What drafts may cost that are made only to learn, and how often."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

_FIRST_WAIT, _LONGEST_WAIT = 8, 512  # steps


class ExplorationBudget:
    """Seconds that drafts may lose which are made to learn. It bounds nothing else."""

    SHARE = 0.0075  # of the time of all steps
    MOST = 8.0  # plain steps that are kept
    _SLOWEST = 1.0  # seconds after which it is never below zero any more

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = False
        self._due: dict[Hashable, tuple[int, int]] = {}  # the step of the next one; the wait behind

    def earn(self, seconds: float, plain: float, batch: int = 1) -> None:
        """A step of ``batch`` sequences, of any kind, took so long; a plain one takes ``plain``.
        The first of all earns a plain step, of several a share: there, less is won by learning."""
        start = 0.0 if self._started else plain / batch**2
        self._started = True
        self.seconds = min(self.seconds + self.SHARE * seconds + start, self.MOST * plain)

    def spend(self, seconds: float) -> None:
        """What was learnt has cost so much more than plain steps."""
        self.seconds = max(self.seconds - max(seconds, 0.0), -self.SHARE * self._SLOWEST)

    def is_due(self, name: Hashable, step: int) -> bool:
        """Whether a drafter may be explored while another one is best."""
        return step >= self._due.get(name, (0, 0))[0]

    def explored(self, name: Hashable, step: int) -> None:
        """Each time that a drafter is explored so it waits twice as long."""
        wait = self._due.get(name, (0, _FIRST_WAIT))[1]
        self._due[name] = step + wait, min(2 * wait, _LONGEST_WAIT)

    def used(self, names: Iterable[Hashable]) -> None:
        """Drafters that are best begin anew."""
        for name in names:
            self._due.pop(name, None)

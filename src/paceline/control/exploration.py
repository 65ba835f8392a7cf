"""What drafts may cost that are made only to learn."""

from __future__ import annotations


class ExplorationBudget:
    """Seconds that drafts may lose which are made to learn. It bounds nothing else."""

    SHARE = 0.0075  # of the time of all steps
    MOST = 8.0  # plain steps that are kept
    _SLOWEST = 1.0  # seconds after which it is never below zero any more

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = False

    def earn(self, seconds: float, plain: float, batch: int = 1) -> None:
        """A step of ``batch`` sequences, of any kind, took so long; a plain one takes ``plain``.
        The first of all earns a plain step, of several a share: there, less is won by learning."""
        start = 0.0 if self._started else plain / batch**2
        self._started = True
        self.seconds = min(self.seconds + self.SHARE * seconds + start, self.MOST * plain)

    def spend(self, seconds: float) -> None:
        """What was learnt has cost so much more than plain steps."""
        self.seconds = max(self.seconds - max(seconds, 0.0), -self.SHARE * self._SLOWEST)

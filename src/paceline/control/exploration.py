"""The budget of exploration: what drafts may cost that are made only to learn, and how often."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

_FIRST_WAIT, _LONGEST_WAIT = 8, 512  # steps


class ExplorationBudget:
    """Seconds that exploration may lose. It limits nothing else."""

    SHARE = 0.0075  # of the time of all steps
    MOST = 8.0  # plain steps that the budget may hold
    _MAX_DEBT = 1.0  # seconds of decoding after which any debt is paid back

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = False
        self._due: dict[Hashable, tuple[int, int]] = {}  # step of the next turn, wait after it

    def earn(self, seconds: float, plain: float, batch: int = 1) -> None:
        """A step of ``batch`` sequences took ``seconds``; a plain one takes ``plain``. The very
        first step earns the time of a plain one (for several sequences a fraction, as learning wins
        less there)."""
        start = 0.0 if self._started else plain / batch**2
        self._started = True
        self.seconds = min(self.seconds + self.SHARE * seconds + start, self.MOST * plain)

    def spend(self, seconds: float) -> None:
        """Exploration has lost ``seconds`` by plain steps."""
        self.seconds = max(self.seconds - max(seconds, 0.0), -self.SHARE * self._MAX_DEBT)

    def is_due(self, name: Hashable, step: int) -> bool:
        """Whether a drafter may be explored in ``step`` while another one is best."""
        return step >= self._due.get(name, (0, 0))[0]

    def explored(self, name: Hashable, step: int) -> None:
        """A drafter was explored in ``step``; it waits twice as long each time."""
        wait = self._due.get(name, (0, _FIRST_WAIT))[1]
        self._due[name] = step + wait, min(2 * wait, _LONGEST_WAIT)

    def used(self, names: Iterable[Hashable]) -> None:
        """These drafters are the best now, so their waits start anew."""
        for name in names:
            self._due.pop(name, None)

"""Plain steps behind a drafter's passes, which drive the target's weights out of the caches.

Such a step takes longer than one among plain steps (SmolLM2 in 8 bits behind passes in 4 bits: 7.2
ms, 6.0 after 16 steps, 5.7 after 24). Between drafts no others are seen, so drafting that gains by
them may lose by plain decoding. They are learnt apart, and where drafting hardly pays, plain steps
in a row are measured now and then.
"""

from __future__ import annotations

WARM = 16  # steps after which the weights are back in the caches
MOST = 0.12  # by which steps are slower until then, on average, at most
_HARDLY = 1.25  # expected speedup below which plain steps in a row are measured
_INTERVAL = 64, 1024  # steps until they are measured again: at first, and at most
_MEASURED = 5  # of these
_ALIKE = 1.5  # times the least, that the longest of them may take


class ColdSteps:
    """Steps since a drafter ran a model, and when to measure plain steps in a row."""

    def __init__(self) -> None:
        self.since = WARM
        self.measuring = False
        self._interval = self._due = _INTERVAL[0]
        self._seconds: list[float] = []

    def ran(self, passes: bool) -> None:
        """A step is over; whether a drafter ran a model for it."""
        self.since = 0 if passes else self.since + 1
        self._due -= 1

    def plain(self, batch: int, seconds: float) -> None:
        """A step without drafts took so long. Several sequences end the measuring: they share what
        passes cost."""
        if batch > 1:
            self.measuring, self._seconds = False, []
        elif self.measuring and self.since > WARM:
            self._seconds.append(seconds)

    def hardly_pays(self, speedup: float) -> None:
        """Drafts with passes are expected to gain so much."""
        self.measuring = self._due <= 0 and speedup < _HARDLY

    def measured(self) -> float | None:
        """Seconds of a plain step in a row, once enough were seen: the median. None if they differ
        too much, as on a busy machine."""
        if len(self._seconds) < _MEASURED:
            return None
        ordered = sorted(self._seconds)
        self.measuring, self._seconds = False, []
        self._interval = min(4 * self._interval, _INTERVAL[1])
        self._due = self._interval
        return ordered[_MEASURED // 2] if ordered[-1] < _ALIKE * ordered[0] else None

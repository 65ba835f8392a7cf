"""Features of a sequence that wait to become rows of an EAGLE head's cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# Features kept of a sequence that could draft but does not; the oldest are then given up, which
# costs a little acceptance and nothing else. With the rows of the last step these are all that is
# kept, and the cache is sized so that there is room for them (build.py).
MOST_WAITING = 512


@dataclass
class HeadState:
    """What an EAGLE head knows of one sequence.

    The head's cache holds ``rows`` (the token of each row); features of the ``waiting`` positions,
    the first of which is ``start``, are still to be computed. Positions before ``start`` that have
    no row (a shared prefix whose features nobody saw) are simply missing from the head's context.
    """

    start: int
    rows: list[int] = field(default_factory=list)
    waiting: list[torch.Tensor] = field(default_factory=list)  # fused later, [n, k * hidden]
    count: int = 0

    @property
    def end(self) -> int:
        """The first position whose feature is not known."""
        return self.start + self.count

    def add(self, position: int, features: torch.Tensor) -> None:
        """Features of consecutive positions from ``position`` on; known ones are passed over."""
        if position > self.end:  # unseen positions lie between
            self.waiting, self.start, self.count = [], position, 0
        known = self.end - position
        if known < len(features):
            self.waiting.append(features[known:])
            self.count += len(features) - known

    def settle(self) -> None:
        """Keep what waits, and no more: a part of a step's rows would keep all of them alive."""
        if self.waiting:
            self.waiting[-1] = alone(self.waiting[-1])
        while self.count > MOST_WAITING:
            excess, oldest = self.count - MOST_WAITING, self.waiting[0]
            if len(oldest) > excess:
                self.waiting[0] = oldest[excess:].clone()
            else:
                excess = len(self.waiting.pop(0))
            self.start += excess
            self.count -= excess

    def take(self) -> torch.Tensor:
        """All waiting features, which are about to become rows."""
        features = torch.cat(self.waiting) if len(self.waiting) > 1 else self.waiting[0]
        self.start, self.count, self.waiting = self.end, 0, []
        return features


def alone(part: torch.Tensor) -> torch.Tensor:
    """The same values, in memory that holds nothing else."""
    return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()

"""Time that passes only when a test says so, and a budget in which every piece takes a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paceline.lab.budget import Budget


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class SecondEach(Budget):
    """Whatever is done in it takes exactly a second of simulated time."""

    def __init__(self, seconds: float | None, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()
        super().__init__(seconds, self.clock)

    @contextmanager
    def task(self, kind: str, size: float = 1.0) -> Iterator[None]:
        with super().task(kind, size):
            yield
            self.clock.now += 1

    def part(self, share: float) -> Budget:
        own = SecondEach(super().part(share).seconds, self.clock)
        own._took = self._took
        return own

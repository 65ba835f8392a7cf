"""What a listener hears of stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paceline.core.stages import Listener, Stage, listening


class Heard(Listener, Stage):
    """Stages that began, notes on the way, and lines that stay."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.lines: list[str] = []

    def begin(self, what: str, total: float | None, unit: str) -> Stage:
        self.stages.append(what)
        return self

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        if note is not None:
            self.notes.append(note)

    def info(self, line: str) -> None:
        self.lines.append(line)


@contextmanager
def heard() -> Iterator[Heard]:
    """All that is said in this block."""
    listener = Heard()
    with listening(listener):
        yield listener

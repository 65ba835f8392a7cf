"""The bar of a call from Python, where no command shows stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.core.stages import Stage, is_heard, stage


class _Bar:
    """One of rich's."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task = bar, task

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        self._bar.advance(self._task, steps)

    def resize(self, total: float) -> None:
        self._bar.update(self._task, total=total)


@contextmanager
def stage_or_bar(what: str, total: int, unit: str, shown: bool) -> Iterator[Stage]:
    """A stage for whoever listens, else a bar of its own if it is to be ``shown``."""
    if is_heard() or not shown:
        with stage(what, total, unit) as begun:
            yield begun
        return
    from rich.progress import Progress

    with Progress(transient=True) as bar:
        yield _Bar(bar, bar.add_task(what, total=total))

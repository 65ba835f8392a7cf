"""Stages on stderr: bars on a terminal, a line at least every 20 seconds in a pipe or a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console

from paceline.core.stages import listening
from paceline.request.progress import Bars, OpenStage, OpenStages

HEARTBEAT_SECONDS = 20.0
_SOON = 1.0  # seconds after which a new stage is worth a line
_APART = 3.0  # seconds between lines of many short stages


@contextmanager
def showing(console: Console | None = None, seconds: float = HEARTBEAT_SECONDS) -> Iterator[None]:
    """Show the stages of this block on stderr, or on ``console``."""
    console = Console(stderr=True) if console is None else console
    bars = console.is_terminal and not console.is_dumb_terminal
    with listening(Bars(console) if bars else _Lines(console, seconds)):
        yield


class _Lines(OpenStages):
    """A line when a stage has lasted a second, then one every ``seconds``; from a thread, because
    what takes long is often one call of a library."""

    def __init__(self, console: Console, seconds: float) -> None:
        super().__init__(console)
        self._seconds = seconds
        self._shown: set[str] = set()  # what has had a line of its own
        self._last = time.monotonic()

    def start(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def info(self, line: str) -> None:
        # Not by Rich: where nobody reads any more it would end the program, and the work goes on.
        with suppress(OSError, ValueError):
            print(f"{line}\n", end="", file=self._console.file, flush=True)
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._ended.wait(min(0.25, self._seconds / 4)):
            stage = self._due()
            if stage is not None:
                self._shown.add(stage.what)
                self.info(stage.line())

    def _due(self) -> OpenStage | None:
        """The innermost new stage, once it has lasted; else, when nothing was said for long, the
        innermost that lasts (of many short ones, what they are part of)."""
        now, stages = time.monotonic(), self.open
        quiet = now - self._last
        soon, apart = min(_SOON, self._seconds), min(_APART, self._seconds)
        new = [s for s in stages if s.what not in self._shown and now - s.start >= soon]
        if new and (quiet >= apart or not self._shown):
            return new[-1]
        if not stages or quiet < self._seconds:
            return None
        lasting = [s for s in stages if now - s.start >= self._seconds / 4]
        return lasting[-1] if lasting else stages[0]

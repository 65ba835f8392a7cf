"""Shows the progress of stages (core/stages.py) on stderr: bars on a terminal; in a pipe or a log a
line at least every 20 seconds. Used by commands and by calls from Python."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext, suppress

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.stages import Listener, Stage, is_heard, listening

HEARTBEAT_SECONDS = 20.0
_FIRST_LINE = 1.0  # seconds after which a new stage gets a line
_LINE_INTERVAL = 3.0  # least seconds between the lines of short stages


def bars(shown: bool) -> AbstractContextManager[None]:
    """``showing`` if ``shown`` is true and no listener is installed yet; else nothing."""
    return showing() if shown and not is_heard() else nullcontext()


class OpenStage(Stage):
    """A stage in progress, with its counts and times."""

    def __init__(self, what: str, total: float | None, unit: str) -> None:
        self.what, self.total, self.unit, self.note = what, total, unit, ""
        self.done = 0.0
        self.start = time.monotonic()

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        self.done += steps
        self.note = self.note if note is None else note

    def resize(self, total: float) -> None:
        self.total = total

    @property
    def counts(self) -> str:
        """The amount of work done, as ``120 of 2,000 records`` or, without a total, ``31 MB``."""
        done, total, unit = self.done, self.total, self.unit
        if not done and total is None:
            return ""
        if total is not None and done > total:
            total = None  # the total was a guess
        if unit == "B":
            sizes = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
            size, unit = next(s for s in sizes if max(done, total or 0) >= 10 * s[0] or s[0] == 1)
            done, total = done / size, None if total is None else total / size
        of = "" if total is None else f" of {total:,.0f}"
        return f"{done:,.0f}{of} {unit}".rstrip()

    @property
    def left(self) -> str:
        """The estimated time left, as ``about 3 min left``; "" while it cannot be estimated."""
        elapsed = time.monotonic() - self.start
        if not self.total or not 0 < self.done < self.total or elapsed < 5:
            return ""
        rest = self.total - self.done
        return f"about {duration(rest if self.unit == 's' else rest * elapsed / self.done)} left"

    def line(self) -> str:
        """The stage in one line of text."""
        elapsed = time.monotonic() - self.start
        so_far = f"{duration(elapsed)} so far" if elapsed >= 1 else ""
        parts = [part for part in (self.counts, self.note, so_far, self.left) if part]
        return self.what + (": " + ", ".join(parts) if parts else " ...")


def duration(seconds: float) -> str:
    """Format seconds as ``45 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class OpenStages(Listener):
    """Keeps the open stages, the innermost last. Subclasses show them between ``start`` and
    ``stop``, which enclose the time while any stage is open."""

    def __init__(self, console: Console) -> None:
        self.open: tuple[OpenStage, ...] = ()  # replaced, never changed: another thread reads it
        self._console = console

    def begin(self, what: str, total: float | None, unit: str) -> Stage:
        first, opened = not self.open, OpenStage(what, total, unit)
        self.open = (*self.open, opened)
        if first:
            self.start()
        return opened

    def end(self, stage: Stage) -> None:
        self.open = tuple(other for other in self.open if other is not stage)
        if not self.open:
            self.stop()

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError


class Bars(OpenStages):
    """Shows a bar for every open stage, which disappears when the stage ends."""

    def start(self) -> None:
        self._live = Live(
            get_renderable=self._drawn,
            console=self._console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # otherwise piped output would go to the terminal
        )
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def info(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _drawn(self) -> Table:
        bars = Table.grid(padding=(0, 1))
        for item in self.open:
            title = f"{item.what}: {item.note}" if item.note else item.what
            bar = ProgressBar(item.total, item.done, width=40, pulse=item.total is None)
            bars.add_row(Text(title), bar, Text(item.counts), Text(item.left, style="dim"))
        return bars


def showing(
    console: Console | None = None, seconds: float = HEARTBEAT_SECONDS
) -> AbstractContextManager[None]:
    """Show the stages of this block on stderr, or on ``console``."""
    console = Console(stderr=True) if console is None else console
    bars = console.is_terminal and not console.is_dumb_terminal
    return listening(Bars(console) if bars else _Lines(console, seconds))


class _Lines(OpenStages):
    """Prints a line when a stage has lasted a second, then one every ``seconds``. The lines come
    from a thread, because long work is often a single call of a library."""

    def __init__(self, console: Console, seconds: float) -> None:
        super().__init__(console)
        self._seconds = seconds
        self._shown: set[str] = set()  # names of stages that have had a line
        self._last = time.monotonic()

    def start(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def info(self, line: str) -> None:
        # Not printed by Rich, which would end the program if the reader of the pipe has gone.
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
        """The stage to print a line about, if any: the innermost one without a line, once it has
        lasted a second; otherwise, if there was no line for ``seconds``, the innermost long stage
        (short stages are represented by the one they are part of)."""
        now, stages = time.monotonic(), self.open
        quiet = now - self._last
        delay, interval = min(_FIRST_LINE, self._seconds), min(_LINE_INTERVAL, self._seconds)
        new = [s for s in stages if s.what not in self._shown and now - s.start >= delay]
        if new and (quiet >= interval or not self._shown):
            return new[-1]
        if not stages or quiet < self._seconds:
            return None
        lasting = [s for s in stages if now - s.start >= self._seconds / 4]
        return lasting[-1] if lasting else stages[0]

"""Stages on stderr: bars on a terminal, a line at least every 20 seconds in a pipe or a log.

A minute without a word looks like a program that hangs; a log full of bars cannot be read.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from paceline.core.stages import Stage, is_heard, listening
from paceline.core.stages import stage as begin_stage
from paceline.lab.budget import Budget

HEARTBEAT_SECONDS = 20.0
_SOON = 1.0  # seconds after which a new stage is worth a line
_APART = 3.0  # seconds between lines of many short stages


@contextmanager
def showing(console: Console | None = None, seconds: float = HEARTBEAT_SECONDS) -> Iterator[None]:
    """Show the stages of this block on stderr, or on ``console``.

    Inside another such block it is the outer one that shows them.
    """
    if console is None and is_heard():
        yield
        return
    console = Console(stderr=True) if console is None else console
    if console.is_terminal and not console.is_dumb_terminal:
        with _Bars(console) as bars, listening(bars):
            yield
        return
    with _Lines(console, seconds) as lines, listening(lines):
        yield


class _Stage:
    """Counts; ``changed`` is told when something is to be shown anew."""

    def __init__(
        self, what: str, total: float | None, unit: str, changed: Callable[[_Stage], None]
    ) -> None:
        self.what, self.total, self.unit, self.note = what, total, unit, ""
        self.done = 0.0
        self.start = time.monotonic()
        self.bar: TaskID | None = None
        self._changed = changed

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        self.done += steps
        self.note = self.note if note is None else note
        self._changed(self)

    def resize(self, total: float) -> None:
        self.total = total
        self._changed(self)

    @property
    def counts(self) -> str:
        """``120 of 2,000 records``, ``31 of 93 MB``, or what is known of it."""
        total = self.total
        if not self.done and total is None:
            return ""
        if self.unit == "B":
            size, name = _byte_unit(max(self.done, total or 0))
            done, unit = f"{self.done / size:.0f}", name
            whole = "" if total is None else f"{total / size:.0f}"
        else:
            # A total that was only a guess is not shown any more once it is passed.
            known = total is not None and self.done <= total
            done, whole = f"{self.done:,.0f}", f"{total:,.0f}" if known else ""
            unit = self.unit
        of = f" of {whole}" if whole else ""
        return f"{done}{of} {unit}".rstrip()

    def line(self) -> str:
        parts = [part for part in (self.counts, self.note) if part]
        elapsed = time.monotonic() - self.start
        if elapsed >= 1:
            parts.append(f"{duration(elapsed)} so far")
        if self.total and 0 < self.done < self.total and elapsed >= 5:
            left = self.total - self.done
            if self.unit != "s":
                left *= elapsed / self.done
            parts.append(f"about {duration(left)} left")
        return self.what + (": " + ", ".join(parts) if parts else " ...")


def _byte_unit(size: float) -> tuple[float, str]:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 10 * unit:
            return unit, name
    return 1.0, "B"


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"


class _Bars:
    """A Rich bar for every open stage; gone when the stage ends."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # else what is piped would go to the terminal
        )

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, what: str, total: float | None, unit: str) -> Stage:
        begun = _Stage(what, total, unit, self._update)
        begun.bar = self._progress.add_task(what, total=total, counts=begun.counts)
        return begun

    def end(self, stage: Stage) -> None:
        if isinstance(stage, _Stage) and stage.bar is not None:
            self._progress.remove_task(stage.bar)

    def info(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _update(self, stage: _Stage) -> None:
        if stage.bar is not None:
            description = f"{stage.what}: {stage.note}" if stage.note else stage.what
            self._progress.update(
                stage.bar,
                description=description,
                completed=stage.done,
                total=stage.total,
                counts=stage.counts,
            )


class _Lines:
    """A line when a stage has lasted a second, then one every ``seconds``, from a thread.

    From a thread, because what takes long is often one call of a library.
    """

    def __init__(self, console: Console, seconds: float) -> None:
        self._console, self._seconds = console, seconds
        self._open: list[_Stage] = []
        self._told: set[str] = set()  # what has had a line of its own
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._last = float("-inf")
        self._next = time.monotonic() + min(_SOON, seconds)
        self._thread = threading.Thread(target=self._beat, name="progress", daemon=True)

    def __enter__(self) -> _Lines:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self, what: str, total: float | None, unit: str) -> Stage:
        begun = _Stage(what, total, unit, lambda stage: None)
        with self._lock:
            self._open.append(begun)
            if what in self._told:  # one of many alike, such as the answers of a measurement
                return begun
            # Something new is said soon, but not each of many short stages.
            soon = max(time.monotonic() + _SOON, self._last + _APART)
            self._next = min(self._next, soon, time.monotonic() + self._seconds)
        return begun

    def end(self, stage: Stage) -> None:
        with self._lock:
            self._open = [other for other in self._open if other is not stage]

    def info(self, line: str) -> None:
        with self._lock:
            self._print(line)

    def _beat(self) -> None:
        while not self._ended.wait(min(0.25, self._seconds / 4)):
            with self._lock:
                if self._open and time.monotonic() >= self._next:
                    newest = self._newest()
                    self._told.add(newest.what)
                    self._print(newest.line())

    def _newest(self) -> _Stage:
        """The innermost stage that is new or lasts; of many short ones, what they are part of."""
        now = time.monotonic()
        for begun in reversed(self._open):
            if begun.what not in self._told or now - begun.start >= self._seconds / 4:
                return begun
        return self._open[0]

    def _print(self, line: str) -> None:
        # Not by Rich: where nobody reads any more it would end the program, and the work goes on.
        with suppress(OSError, ValueError):
            print(line, file=self._console.file, flush=True)
        self._last = time.monotonic()
        self._next = self._last + self._seconds


@contextmanager
def spending(what: str, budget: Budget, pieces: int) -> Iterator[Callable[[str], None]]:
    """A stage of so many seconds or, without an end, of so many pieces; given what comes next."""
    if budget.seconds is None:
        with begin_stage(what, pieces) as begun:
            yield lambda note: begun.advance(1, note)
        return
    with begin_stage(what, budget.seconds, "s") as begun:
        shown = 0.0

        def advance(note: str) -> None:
            nonlocal shown
            now = min(budget.spent, budget.seconds or 0.0)
            begun.advance(now - shown, note)
            shown = now

        yield advance


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[float, str], None]]:
    """One stage, shown on stderr (stdout carries the result); ``advance(1, "chat: ngram")``: so
    many steps are done, and what comes next."""
    with showing(), begin_stage(description, total) as begun:
        yield begun.advance

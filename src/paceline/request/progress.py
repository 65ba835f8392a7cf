"""Shows the progress of stages (core/stages.py) on stderr: Rich's bars on a terminal, elsewhere
lines. Used by commands and by calls from Python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import Timer
from time import monotonic

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from paceline.core.stages import Listener, Stage, is_heard, listening

_BEGIN_SECONDS = 1.0  # after which a stage that is still open gets its first line
_ADVANCE_SECONDS = 20.0  # least time between a line and that of a stage that advances


def bars(shown: bool) -> AbstractContextManager[None]:
    """``showing`` if ``shown`` is true and no listener is installed yet; else nothing."""
    return showing() if shown and not is_heard() else nullcontext()


def showing(console: Console | None = None) -> AbstractContextManager[None]:
    """Show the stages of this block on stderr, or on ``console``."""
    console = Console(stderr=True) if console is None else console
    bars = console.is_terminal and not console.is_dumb_terminal
    return listening(_Bars(console) if bars else _Lines(console))


class OpenStage(Stage):
    """A stage in progress; calls ``changed`` with itself when it advances."""

    def __init__(
        self, what: str, total: float | None, unit: str, changed: Callable[[OpenStage], None]
    ) -> None:
        self.what, self.total, self.unit, self.note = what, total, unit, ""
        self.done = 0.0
        self.task = TaskID(0)  # of its bar
        self._changed = changed

    def advance(self, steps: float = 1, note: str | None = None) -> None:
        self.done += steps
        self.note = self.note if note is None else note
        self._changed(self)

    @property
    def counts(self) -> str:
        """The amount of work done, as ``120 of 2,000 records`` or, without a total, ``31 MB``."""
        if not self.done and self.total is None:
            return ""
        amounts = [self.done] if self.total is None else [self.done, self.total]
        if self.unit == "B":
            return " of ".join(decimal(int(amount)) for amount in amounts)
        return f"{' of '.join(f'{amount:,.0f}' for amount in amounts)} {self.unit}".rstrip()


class _Bars(Listener):
    """Shows a bar for every open stage, which disappears when the stage ends."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[counts]}", markup=False),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),  # otherwise piped output would go to the terminal
        )

    def begin(self, what: str, total: float | None, unit: str) -> Stage:
        opened = OpenStage(what, total, unit, self._update)
        self._progress.start()
        opened.task = self._progress.add_task(what, total=total, counts=opened.counts)
        return opened

    def _update(self, stage: OpenStage) -> None:
        if stage.task not in self._progress.task_ids:  # another thread may be late
            return
        title = f"{stage.what}: {stage.note}" if stage.note else stage.what
        self._progress.update(
            stage.task,
            completed=stage.done,
            total=stage.total,
            description=title,
            counts=stage.counts,
        )

    def end(self, stage: Stage) -> None:
        assert isinstance(stage, OpenStage)
        self._progress.remove_task(stage.task)
        if not self._progress.tasks:
            self._progress.stop()

    def info(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=True, markup=False)


class _Lines(Listener):
    """Prints a line for a stage that takes more than a second, and others as stages advance. The
    first line comes from a timer, as a single call of a library may block for minutes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last, self._line = monotonic(), ""  # of the last line: its time and text
        self._first_lines: dict[Stage, Timer] = {}

    def begin(self, what: str, total: float | None, unit: str) -> Stage:
        opened = OpenStage(what, total, unit, lambda stage: self._show(stage, _ADVANCE_SECONDS))
        self._first_lines[opened] = timer = Timer(_BEGIN_SECONDS, self._show, (opened,))
        timer.daemon = True
        timer.start()
        return opened

    def end(self, stage: Stage) -> None:
        self._first_lines.pop(stage).cancel()

    def _show(self, stage: OpenStage, interval: float = 0.0) -> None:
        if monotonic() - self._last >= interval:
            details = ", ".join(filter(None, (stage.counts, stage.note)))
            line = f"{stage.what}: {details}" if details else f"{stage.what} ..."
            if line != self._line:
                self.info(line)

    def info(self, line: str) -> None:
        # Not printed by Rich, which would end the program if the reader of the pipe has gone.
        with suppress(OSError, ValueError):
            print(f"{line}\n", end="", file=self._console.file, flush=True)
        self._last, self._line = monotonic(), line

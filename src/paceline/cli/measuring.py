"""What the measuring commands share: reports, Ctrl-C and budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from paceline.cli.output import WriteOptions, print_json
from paceline.core.stages import info, stage
from paceline.lab.budget import Budget
from paceline.lab.report.document import Report
from paceline.lab.report.render import check_path, print_report, write
from paceline.settings import under

NOT_ENOUGH = 3  # exit status: nothing is wrong, but the budget was too small to say anything
_output, _budget = under("Output"), under("Budget")

# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReportOptions(WriteOptions):
    """Where the result goes besides the terminal. Raises ConfigError on a bad report's name."""

    report: str | None = _output(None, "Also write a report, an .html or .md file.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.report is not None:
            check_path(self.report)

    def emit(self, record: dict[str, Any], report: Report, details: bool = True) -> None:
        """Tables or JSON to stdout, and the report's file if one was asked for."""
        if self.as_json:
            print_json(record)
        else:
            print_report(report, Console(), details)
        if self.report is not None:
            write(report, self.report)
            info(f"report: {self.report}")


@dataclass(frozen=True)
class RunOptions(ReportOptions):
    """How long measuring may take, and where results go."""

    seconds: float = _budget(
        180.0, "Time to spend, loading counted. 0 takes as long as the whole takes.", low=0
    )

    def begin(self) -> Budget:
        return Budget(self.seconds or None)


# -- Ctrl-C and the time ---------------------------------------------------------------------------


class Interruption:
    """Ctrl-C ends the block early instead of the program; ``code`` is the exit status, then 130."""

    code = 0

    def __enter__(self) -> Interruption:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is KeyboardInterrupt:
            self.code = 130
            info("interrupted: the figures are of what was measured until now")
        return kind is KeyboardInterrupt


@contextmanager
def spending(what: str, budget: Budget, pieces: int = 0) -> Iterator[Callable[[str], None]]:
    """A stage of so many seconds or, without an end, of so many pieces; given what comes next."""
    seconds = budget.seconds
    total, unit = (pieces, "") if seconds is None else (seconds, "s")
    with stage(what, total, unit) as begun:
        shown = 0.0

        def advance(note: str) -> None:
            nonlocal shown
            now = shown + 1 if seconds is None else min(budget.spent, seconds)
            begun.advance(now - shown, note)
            shown = now

        yield advance

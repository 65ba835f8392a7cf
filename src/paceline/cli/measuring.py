"""Options and manners that the measuring commands share: prompts, reports, Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from paceline.cli.output import print_json
from paceline.settings import under

if TYPE_CHECKING:
    from paceline.tools.bench.prompts import BenchPrompt
    from paceline.tools.report.document import Report

NOT_ENOUGH = 3  # exit status: nothing is wrong, but the budget was too small to say anything
_prompts, _output = under("Prompts"), under("Output")


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are decoded."""

    prompts: str | None = _prompts(
        None,
        "JSONL (Spec-Bench, MT-Bench, HumanEval, GSM8K or our own layout) or plain text.",
        shown="the shipped set",
    )
    category: tuple[str, ...] = _prompts((), "Only this category; repeatable.", shown="all")
    per_category: int | None = _prompts(None, "So many prompts of each category.", low=1)

    def load(self, per_category: int | None = None) -> list[BenchPrompt]:
        """``per_category`` is the command's own default. Raises DataError."""
        from paceline.tools.bench.prompts import load_prompts

        return load_prompts(self.prompts, self.category, self.per_category or per_category)


@dataclass(frozen=True)
class ReportOptions:
    """Where the result goes besides the terminal."""

    as_json: bool = _output(False, "One JSON object instead of tables.", flags=("--json",))
    report: str | None = _output(
        None, "Also write a report, with plots, to this .html or .md file."
    )

    def check(self) -> None:
        """Refuse a bad report name before the work begins. Raises ConfigError."""
        if self.report is not None:
            from paceline.tools.report.document import check_path

            check_path(self.report)

    def emit(self, record: dict[str, Any], report: Report) -> None:
        """Tables or JSON to stdout, and the report's file if one was asked for."""
        from paceline.tools.report.terminal import print_report

        if self.as_json:
            print_json(record)
        else:
            print_report(report, Console())
        if self.report is not None:
            written = report.write(self.report)
            print(f"report: {', '.join(map(str, written))}", file=sys.stderr)


class Interruption:
    """Whether Ctrl-C ended the work early."""

    came = False

    def __bool__(self) -> bool:
        return self.came

    def finish(self) -> None:
        """Exit 130 if it did."""
        if self.came:
            raise typer.Exit(130)


@contextmanager
def partial_results() -> Iterator[Interruption]:
    """Ctrl-C ends the block early instead of the program.

    with partial_results() as interrupted:
        measure_into(record)
    emit(record)
    interrupted.finish()
    """
    interrupted = Interruption()
    try:
        yield interrupted
    except KeyboardInterrupt:
        interrupted.came = True
        print("interrupted: the figures are of what was measured until now", file=sys.stderr)

"""Options and manners that the measuring commands share: prompts, reports, Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from paceline.cli.output import FORCE, print_json, replace_anything
from paceline.errors import DataError
from paceline.settings import under

if TYPE_CHECKING:
    from paceline.lab.bench.prompts import BenchPrompt
    from paceline.lab.perplexity import TextPerplexity
    from paceline.lab.report.document import Report
    from paceline.llm import LLM

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
        from paceline.lab.bench.prompts import load_prompts

        return load_prompts(self.prompts, self.category, self.per_category or per_category)


@dataclass(frozen=True)
class ReportOptions:
    """Where the result goes besides the terminal."""

    as_json: bool = _output(False, "One JSON object instead of tables.", flags=("--json",))
    report: str | None = _output(
        None, "Also write a report, with plots, to this .html or .md file."
    )

    force: bool = _output(False, FORCE)

    def check(self) -> None:
        """Refuse a bad report name before the work begins. Raises ConfigError."""
        replace_anything(self.force)
        if self.report is not None:
            from paceline.lab.report.render import check_path

            check_path(self.report)

    def emit(self, record: dict[str, Any], report: Report) -> None:
        """Tables or JSON to stdout, and the report's file if one was asked for."""
        from paceline.lab.report.render import print_report, write

        if self.as_json:
            print_json(record)
        else:
            print_report(report, Console())
        if self.report is not None:
            written = write(report, self.report)
            print(f"report: {', '.join(map(str, written))}", file=sys.stderr)


@dataclass(frozen=True)
class PerplexityOptions:
    """What quantising cost."""

    perplexity: str | None = _prompts(
        None,
        "JSONL of texts or chats: also tell the target's perplexity on them, beside that of the "
        "model it was quantised from.",
    )
    original: str | None = _prompts(
        None,
        "The model that a quantised checkpoint was made of.",
        shown="with --quantize or --kv-cache-dtype the model itself",
    )

    def check(self) -> None:
        """Raises DataError on a file that is not there."""
        if self.perplexity is not None and not Path(self.perplexity).is_file():
            raise DataError(f"--perplexity: there is no file {self.perplexity}; give one of texts")

    def compared(self, llm: LLM, model: str, quantize: str | None, tokens: int) -> TextPerplexity:
        """Of a loaded target; on the shipped prompts if no file is named."""
        from paceline.lab.perplexity import beside_original

        file = None if self.perplexity is None else Path(self.perplexity)
        plain = quantize is None and llm.target.cache_dtype == llm.target.dtype
        original = self.original or (None if plain else model)
        return beside_original(llm.target, llm.tokenizer, file, original, tokens)


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

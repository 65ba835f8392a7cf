"""A suite's result: the table that the benchmark publishes, and the JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.tools.bench import cells
from paceline.tools.bench.methods import PLAIN
from paceline.tools.bench.pages import ResultPages
from paceline.tools.bench.result import BenchResult
from paceline.tools.bench.suite_figures import OVERALL, TaskFigures
from paceline.tools.bench.suites import Suite
from paceline.tools.report import plots
from paceline.tools.report.document import Cell, Figure, Report, Table, Text

_NOTE = (
    "Speedup: mean over the questions of tokens a second, by that of our own plain decoding; "
    "prompts included. #Mean accepted tokens: tokens a target step, the bonus token counted (plain "
    "decoding has 1.00), without the steps that read a prompt."
)
_TEXTS = (
    "Turns in which all were asked the same, beside plain decoding's: after a near tie "
    "conversations go on differently."
)
_UNFINISHED = "Not all was measured: these are the figures of the questions that all answered."


@dataclass(frozen=True)
class SuiteResult:
    """``base`` has what a benchmark of any prompts has: machine, settings, texts, complaints."""

    suite: Suite
    base: BenchResult
    figures: Sequence[TaskFigures]
    cut: int = 0  # dialogues whose later turns found no room in the context
    complete: bool = True

    def record(self) -> dict[str, Any]:
        """Everything, for machines."""
        base = self.base.record()
        kept = ("model", "interrupted", "machine", "settings", "methods", "texts", "idle", "bugs")
        return {
            "suite": self.suite.name,
            **{key: base[key] for key in kept},
            "complete": self.complete,
            "figures": [figures.record() for figures in self.figures],
            "questions_left_out": list(self.base.left_out),
            "dialogues_cut": self.cut,
        }


def suite_report(result: SuiteResult) -> Report:
    """One published table a temperature, and what is behind it."""
    pages = _SuitePages(result.base)
    report = Report(f"{result.suite.title} with {result.base.model}")
    whole = result.complete and not result.base.interrupted
    cut = f"{result.cut} dialogues ended early: the context had no room for a turn."
    warnings = pages.warnings(None if whole else _UNFINISHED, *([cut] if result.cut else []))
    report.add("Run", Text(pages.circumstances()), *warnings)
    for temperature in dict.fromkeys(one.temperature for one in result.figures):
        own = [one for one in result.figures if one.temperature == temperature]
        place = f" at temperature {temperature:g}"
        report.add(result.suite.title + place, pages.published(own), *pages.bars(own, place))
        if len(_tasks(own)) > 1:
            accepted = pages.by_task(own, lambda one: cells.number(one.mean_accepted_tokens))
            report.add("#Mean accepted tokens by task" + place, accepted)
        report.add("Tokens a second by task" + place, pages.speeds(own))
    pages.texts(report, _TEXTS)
    return report


def _tasks(own: Sequence[TaskFigures]) -> list[str]:
    return list(dict.fromkeys(one.task for one in own if one.task != OVERALL))


def _task(one: TaskFigures) -> str:
    return one.task


class _SuitePages(ResultPages):
    def circumstances(self) -> str:
        settings = self.result.settings
        ends = "" if settings["ignore_eos"] else ", answers end where the model ends them"
        temperatures = ", ".join(f"{value:g}" for value in settings["temperature"])
        return self.run_line(
            f"{settings['questions']} questions",
            f"batch {settings['batch']}, temperature {temperatures}; "
            f"at most {settings['max_tokens']} new tokens a turn{ends}",
            settings["rounds"],
            "the bonus token is counted",
        )

    def published(self, own: Sequence[TaskFigures]) -> Table:
        """Spec-Bench's leaderboard: speedup by task, #mean accepted tokens, overall."""
        tasks = _tasks(own)
        whole = OVERALL if any(one.task == OVERALL for one in own) else tasks[0]
        shown = tasks if whole == OVERALL else []
        speedups = self.by_method(own, shown, _task, lambda one: cells.times(one.speedup))
        last = {self.label[one.method]: one for one in own if one.task == whole}
        rows = [
            [
                name,
                *speedups[name],
                cells.number(one.mean_accepted_tokens),
                cells.times(one.speedup),
            ]
            for name, one in last.items()
        ]
        end = "Overall" if whole == OVERALL else "Speedup"
        return Table(["Models", *shown, "#Mean Accepted Tokens", end], rows, note=_NOTE)

    def speeds(self, own: Sequence[TaskFigures]) -> Table:
        table = self.by_task(own, lambda one: f"{one.tokens_per_second:.1f}")
        counts = [one.questions for one in own if one.method == PLAIN]
        return Table(table.columns, [*table.rows, ["questions", *counts]])

    def by_task(self, own: Sequence[TaskFigures], cell: Callable[[TaskFigures], Cell]) -> Table:
        tasks = list(dict.fromkeys(map(_task, own)))
        found = self.by_method(own, tasks, _task, cell)
        return Table(["Models", *tasks], [[name, *values] for name, values in found.items()])

    def bars(self, own: Sequence[TaskFigures], place: str) -> list[Figure]:
        tasks = _tasks(own)
        if len(tasks) < 2:
            return []
        drafting = [one for one in own if one.method != PLAIN]
        series = self.by_method(drafting, tasks, _task, lambda one: one.speedup)
        name = "speedup" + place.replace(" at temperature ", "-t")
        title = f"Speedup over plain decoding, by task{place}"
        return [Figure(title, lambda: plots.bars(tasks, series, "speedup", baseline=1.0), name)]

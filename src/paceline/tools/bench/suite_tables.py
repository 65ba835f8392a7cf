"""A suite's result: the table that the benchmark publishes, and the JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.tools.bench import cells
from paceline.tools.bench.conversations import SuiteRecord
from paceline.tools.bench.methods import PLAIN
from paceline.tools.bench.result import BenchResult, labels
from paceline.tools.bench.suite_figures import OVERALL, TaskFigures
from paceline.tools.bench.suites import Suite
from paceline.tools.report import plots
from paceline.tools.report.document import Cell, Figure, Report, Table, Text

_NOTE = (
    "Speedup: mean over the questions of tokens a second, by that of our own plain decoding; "
    "prompts included. #Mean accepted tokens: tokens a target step, the bonus token counted (plain "
    "decoding has 1.00), without the steps that read a prompt."
)


@dataclass(frozen=True)
class SuiteResult:
    """``base`` has what a benchmark of any prompts has: machine, settings, texts, complaints."""

    suite: Suite
    base: BenchResult
    figures: Sequence[TaskFigures]
    cut: int = 0  # dialogues whose later turns found no room in the context
    complete: bool = True

    @classmethod
    def of(
        cls,
        suite: Suite,
        base: BenchResult,
        figures: Sequence[TaskFigures],
        record: SuiteRecord,
        complete: bool,
    ) -> SuiteResult:
        cut = sum(own.cut for done in record.answered for own in done.dialogues.values())
        return cls(suite, base, figures, cut, complete)

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
    pages = _Pages(result)
    report = Report(f"{result.suite.title} with {result.base.model}")
    report.add("Run", Text(pages.circumstances()), *pages.warnings())
    for temperature in dict.fromkeys(one.temperature for one in result.figures):
        own = [one for one in result.figures if one.temperature == temperature]
        place = f" at temperature {temperature:g}"
        report.add(result.suite.title + place, pages.published(own), *pages.bars(own, place))
        if len(pages.tasks(own)) > 1:
            report.add("#Mean accepted tokens by task" + place, pages.accepted(own))
        report.add("Tokens a second by task" + place, pages.speeds(own))
    pages.texts(report)
    return report


class _Pages:
    def __init__(self, result: SuiteResult) -> None:
        self.result, self.base = result, result.base
        self.label = labels([method.name for method in self.base.methods])

    def circumstances(self) -> str:
        machine, settings = self.base.machine, self.base.settings
        where = machine["processor"]
        if machine["device"] == "cpu":
            where += f", {machine['threads']} of {machine['cores']} threads"
        ends = "" if settings["ignore_eos"] else ", answers end where the model ends them"
        temperatures = ", ".join(f"{value:g}" for value in settings["temperature"])
        rounds = settings["rounds"]
        parts = [
            f"{where}, {machine['dtype']}, torch {machine['torch']}",
            f"{settings['questions']} questions from {settings['source']}",
            f"batch {settings['batch']}, temperature {temperatures}",
            f"at most {settings['max_tokens']} new tokens a turn{ends}",
            f"the methods take turns, {rounds} {'round' if rounds == 1 else 'rounds'}",
            "the bonus token is counted",
        ]
        return "; ".join(parts) + "."

    def warnings(self) -> list[Text]:
        found = [Text(line + ".", warning=True) for line in self.base.complaints()]
        if not self.result.complete or self.base.interrupted:
            text = "Not all was measured: these are the figures of the questions that all answered."
            found.append(Text(text, warning=True))
        if self.base.left_out:
            names = ", ".join(self.base.left_out)
            found.append(Text(f"Left out, as too long for the model: {names}."))
        if self.result.cut:
            text = f"{self.result.cut} dialogues ended early: the context had no room for a turn."
            found.append(Text(text))
        if self.base.settings.get("lossy"):
            found.append(Text("Typical acceptance: sampled text is not the target's own."))
        return found

    def tasks(self, own: Sequence[TaskFigures]) -> list[str]:
        return list(dict.fromkeys(one.task for one in own if one.task != OVERALL))

    def published(self, own: Sequence[TaskFigures]) -> Table:
        """Spec-Bench's leaderboard: speedup by task, #mean accepted tokens, overall."""
        tasks, found = self.tasks(own), {(one.method, one.task): one for one in own}
        many = any(one.task == OVERALL for one in own)
        head = ["Models", *(tasks if many else []), "#Mean Accepted Tokens"]
        body: list[list[Cell]] = []
        for name in dict.fromkeys(one.method for one in own):
            whole = found[name, OVERALL if many else tasks[0]]
            line: list[Cell] = [self.label[name]]
            if many:
                line += [cells.times(found[name, task].speedup) for task in tasks]
            line += [cells.number(whole.mean_accepted_tokens), cells.times(whole.speedup)]
            body.append(line)
        return Table([*head, "Overall" if many else "Speedup"], body, note=_NOTE)

    def accepted(self, own: Sequence[TaskFigures]) -> Table:
        return self._by_task(own, lambda one: cells.number(one.mean_accepted_tokens))

    def speeds(self, own: Sequence[TaskFigures]) -> Table:
        table = self._by_task(own, lambda one: f"{one.tokens_per_second:.1f}")
        counts: list[Cell] = ["questions"]
        plain = [one for one in own if one.method == PLAIN]
        return Table(table.columns, [*table.rows, [*counts, *(one.questions for one in plain)]])

    def _by_task(self, own: Sequence[TaskFigures], cell: Any) -> Table:
        tasks = list(dict.fromkeys(one.task for one in own))
        found = {(one.method, one.task): one for one in own}
        names = list(dict.fromkeys(one.method for one in own))
        rows = [[self.label[n], *(cell(found[n, task]) for task in tasks)] for n in names]
        return Table(["Models", *tasks], rows)

    def bars(self, own: Sequence[TaskFigures], place: str) -> list[Figure]:
        tasks = self.tasks(own)
        if len(tasks) < 2:
            return []
        found = {(one.method, one.task): one.speedup for one in own}
        names = [n for n in dict.fromkeys(one.method for one in own) if n != PLAIN]
        series = {self.label[n]: [found.get((n, task)) for task in tasks] for n in names}
        name = "speedup" + place.replace(" at temperature ", "-t")
        title = f"Speedup over plain decoding, by task{place}"
        return [Figure(title, lambda: plots.bars(tasks, series, "speedup", baseline=1.0), name)]

    def texts(self, report: Report) -> None:
        counts = self.base.texts.counts
        if not counts:
            return
        kinds = ("identical", "near tie", "different")
        body: list[list[Cell]] = [
            [self.label[name], *(found.get(kind, 0) for kind in kinds)]
            for name, found in counts.items()
        ]
        note = (
            "Turns in which all were asked the same, beside plain decoding's: after a near tie "
            "conversations go on differently."
        )
        report.add("Same text", Table(["method", *kinds], body, note=note))

"""A suite's result: the table that the benchmark publishes, and the JSON object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from paceline.lab.bench import cells
from paceline.lab.bench.conversations import Suite
from paceline.lab.bench.figures import complete
from paceline.lab.bench.methods import PLAIN
from paceline.lab.bench.pages import ResultPages
from paceline.lab.bench.result import BenchResult
from paceline.lab.bench.runner import Heat, HeatRecord
from paceline.lab.bench.runs import TimedRun
from paceline.lab.report.document import Cell, Report, Table

OVERALL = "Overall"


@dataclass(frozen=True)
class TaskFigures:
    """One method on one task. ``mean_accepted_tokens`` is None where every answer was a token."""

    method: str
    task: str
    temperature: float
    questions: int
    turns: int
    tokens: int
    tokens_per_second: float
    speedup: float
    mean_accepted_tokens: float | None


def task_figures(suite: Suite, record: HeatRecord) -> list[TaskFigures]:
    """For each temperature, each task that was measured and overall, each method. A round that
    was cut short does not count.

    As the benchmarks define them. Spec-Bench (speed.py): mean accepted tokens are all tokens of all
    target steps by these steps, the bonus token included, so plain decoding has 1; a task's speed
    is the mean over its questions of tokens a second, its speedup that speed by plain decoding's.
    MT-Bench, HumanEval and GSM8K tables of EAGLE (tau and speedup) are defined alike. Over rounds,
    the mean.
    """
    found: list[TaskFigures] = []
    tasks = list(dict.fromkeys(suite.tasks.values()))
    for temperature in dict.fromkeys(heat.job.temperature for heat in record.heats):
        own = [heat for heat in record.heats if heat.job.temperature == temperature]
        slices = [(task, [heat for heat in own if heat.job.category == task]) for task in tasks]
        if len(tasks) > 1:
            slices.append((OVERALL, own))
        for task, heats in slices:
            if heats:
                rounds = complete(heats)
                found += [_figures(n, task, temperature, rounds) for n in heats[0].outcomes]
    return found


def _figures(
    name: str, task: str, temperature: float, rounds: Sequence[Sequence[Heat]]
) -> TaskFigures:
    runs = [heat.outcomes[name] for own in rounds for heat in own]
    speeds = [mean(heat.outcomes[name].rate for heat in own) for own in rounds]
    plain = [mean(heat.outcomes[PLAIN].rate for heat in own) for own in rounds]
    return TaskFigures(
        method=name,
        task=task,
        temperature=temperature,
        questions=len(rounds[0]),
        turns=sum(len(heat.outcomes[name].answers) for heat in rounds[0]),
        tokens=sum(run.tokens for run in runs),
        tokens_per_second=mean(speeds),
        speedup=mean(own / base for own, base in zip(speeds, plain, strict=True)),
        mean_accepted_tokens=accepted_tokens(runs),
    )


def accepted_tokens(runs: Sequence[TimedRun]) -> float | None:
    """Tokens a target step, without the steps that read a prompt: heads cannot draft before."""
    answers = [answer for run in runs for answer in run.answers]
    steps = sum(run.steps for run in runs) - len(answers)
    tokens = sum(answer.count - answer.arrivals[0][1] for answer in answers)
    return tokens / steps if steps else None


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
            "figures": [asdict(figures) for figures in self.figures],
            "questions_left_out": list(self.base.left_out),
            "dialogues_cut": self.cut,
        }


def suite_report(result: SuiteResult) -> Report:
    """One published table a temperature, and what is behind it."""
    base, settings, title = result.base, result.base.settings, result.suite.title
    pages = _SuitePages(base, Report(f"{title} with {base.model}"))
    ends = "" if settings["ignore_eos"] else ", answers end where the model ends them"
    temperatures = ", ".join(f"{value:g}" for value in settings["temperature"])
    cut = f"{result.cut} dialogues ended early: the context had no room for a turn."
    pages.begin(
        f"{settings['questions']} questions",
        f"batch {settings['batch']}, temperature {temperatures}; "
        f"at most {settings['max_tokens']} new tokens a turn{ends}",
        settings["rounds"],
        "; the bonus token is counted",
        unfinished=None if result.complete and not base.interrupted else _UNFINISHED,
        notes=[cut] if result.cut else [],
    )
    for temperature in dict.fromkeys(one.temperature for one in result.figures):
        own = [one for one in result.figures if one.temperature == temperature]
        pages.add(title, own, f" at temperature {temperature:g}", f"speedup-t{temperature:g}")
    pages.texts(_TEXTS)
    pages.unequal()
    return pages.report


class _SuitePages(ResultPages):
    def add(self, suite: str, own: Sequence[TaskFigures], place: str, name: str) -> None:
        """The tables of one temperature."""
        every = list(dict.fromkeys(one.task for one in own))
        tasks = [task for task in every if task != OVERALL]
        drafting = [one for one in own if one.method != PLAIN]
        series = self.by_method(drafting, tasks, "task", "speedup")
        title = f"Speedup over plain decoding, by task{place}"
        pictures = [self.bars(title, name, tasks, series)] if len(tasks) > 1 else []
        self.report.add(suite + place, self._published(own, tasks), *pictures)
        if len(tasks) > 1:
            accepted = self._by_task(own, every, "mean_accepted_tokens", cells.number)
            self.report.add("#Mean accepted tokens by task" + place, accepted)
        speeds = self._by_task(own, every, "tokens_per_second", "{:.1f}".format)
        counts: list[Cell] = ["questions", *(one.questions for one in own if one.method == PLAIN)]
        table = Table(speeds.columns, [*speeds.rows, counts])
        self.report.add("Tokens a second by task" + place, table)

    def _published(self, own: Sequence[TaskFigures], tasks: Sequence[str]) -> Table:
        """Spec-Bench's leaderboard: speedup by task, #mean accepted tokens, overall."""
        many = any(one.task == OVERALL for one in own)
        shown, whole = (tasks, OVERALL) if many else ((), tasks[0])
        rows = {
            name: [name, *speedups]
            for name, speedups in self.by_method(own, shown, "task", "speedup", cells.times).items()
        }
        for value, form in (("mean_accepted_tokens", cells.number), ("speedup", cells.times)):
            for name, cell in self.by_method(own, [whole], "task", value, form).items():
                rows[name] += cell
        heads = ["Models", *shown, "#Mean Accepted Tokens", "Overall" if many else "Speedup"]
        return Table(heads, list(rows.values()), note=_NOTE)

    def _by_task(
        self,
        own: Sequence[TaskFigures],
        tasks: Sequence[str],
        value: str,
        form: Callable[[float], str],
    ) -> Table:
        found = self.by_method(own, tasks, "task", value, form)
        return Table(["Models", *tasks], [[name, *values] for name, values in found.items()])

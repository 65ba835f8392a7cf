"""A suite's result: the table that the benchmark publishes, and the JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from paceline.lab.bench.conversations import Suite
from paceline.lab.bench.figures import complete
from paceline.lab.bench.methods import PLAIN
from paceline.lab.bench.pages import ResultPages, rounds_in_words, speedup_bars
from paceline.lab.bench.result import BenchResult
from paceline.lab.bench.runner import Heat, HeatRecord
from paceline.lab.bench.runs import TimedRun
from paceline.lab.report.columns import number, times
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
    figures: list[TaskFigures] = []
    tasks = list(dict.fromkeys(suite.tasks.values()))
    for temperature in dict.fromkeys(heat.job.temperature for heat in record.heats):
        heats_at = [heat for heat in record.heats if heat.job.temperature == temperature]
        slices = [
            (task, [heat for heat in heats_at if heat.job.category == task]) for task in tasks
        ]
        if len(tasks) > 1:
            slices.append((OVERALL, heats_at))
        for task, heats in slices:
            if heats:
                rounds = complete(heats)
                figures += [_figures(n, task, temperature, rounds) for n in heats[0].outcomes]
    return figures


def _figures(
    name: str, task: str, temperature: float, rounds: Sequence[Sequence[Heat]]
) -> TaskFigures:
    runs = [heat.outcomes[name] for round_heats in rounds for heat in round_heats]
    speeds = [mean(heat.outcomes[name].rate for heat in round_heats) for round_heats in rounds]
    plain = [mean(heat.outcomes[PLAIN].rate for heat in round_heats) for round_heats in rounds]
    return TaskFigures(
        method=name,
        task=task,
        temperature=temperature,
        questions=len(rounds[0]),
        turns=sum(len(heat.outcomes[name].answers) for heat in rounds[0]),
        tokens=sum(run.tokens for run in runs),
        tokens_per_second=mean(speeds),
        speedup=mean(speed / base for speed, base in zip(speeds, plain, strict=True)),
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
    pages = ResultPages(base, Report(f"{title} with {base.model}"))
    ends = "" if settings["ignore_eos"] else ", answers end where the model ends them"
    temperatures = ", ".join(f"{value:g}" for value in settings["temperature"])
    cut = f"{result.cut} dialogues ended early: the context had no room for a turn."
    pages.begin(
        f"{settings['questions']} questions from {settings['source']}; batch {settings['batch']}, "
        f"temperature {temperatures}; at most {settings['max_tokens']} new tokens a turn{ends}; "
        f"the methods take turns, {rounds_in_words(settings['rounds'])}; "
        "the bonus token is counted",
        [] if result.complete and not base.interrupted else [_UNFINISHED],
        [cut] if result.cut else [],
    )
    for temperature in dict.fromkeys(one.temperature for one in result.figures):
        figures_at = [one for one in result.figures if one.temperature == temperature]
        at, tasks = (
            f" at temperature {temperature:g}",
            list(dict.fromkeys(one.task for one in figures_at)),
        )
        alone = [task for task in tasks if task != OVERALL]
        whole = [OVERALL] if OVERALL in tasks else tasks
        plain = [one.questions for one in figures_at if one.method == PLAIN]

        def table(
            *parts: tuple[str, Sequence[str], str, Any], figures: Any = figures_at, **more: Any
        ) -> Table:
            """A row for each method; a part is an attribute at some tasks under its headings."""
            rows: dict[str, list[Cell]] = {}
            for value, points, _, form in parts:
                for name, cells in pages.by_method(figures, points, "task", value, form).items():
                    rows.setdefault(name, [name]).extend(cells)
            heads = [head or point for _, points, head, _ in parts for point in points]
            return Table(["Models", *heads], [*rows.values(), *more.pop("rows", ())], **more)

        series = pages.by_method(
            [one for one in figures_at if one.method != PLAIN], alone, "task", "speedup"
        )
        caption, name = f"Speedup over plain decoding, by task{at}", f"speedup-t{temperature:g}"
        pages.report.add(
            title + at,
            table(  # Spec-Bench's leaderboard
                ("speedup", alone if OVERALL in tasks else (), "", times),
                ("mean_accepted_tokens", whole, "#Mean Accepted Tokens", number),
                ("speedup", whole, "Overall" if OVERALL in tasks else "Speedup", times),
                note=_NOTE,
            ),
            *([speedup_bars(caption, name, alone, series)] if len(alone) > 1 else []),
        )
        if len(alone) > 1:
            accepted = table(("mean_accepted_tokens", tasks, "", number))
            pages.report.add("#Mean accepted tokens by task" + at, accepted)
        speeds = table(
            ("tokens_per_second", tasks, "", "{:.1f}".format), rows=[["questions", *plain]]
        )
        pages.report.add("Tokens a second by task" + at, speeds)
    pages.texts(_TEXTS)
    pages.unequal()
    return pages.report

"""The figures that the public benchmarks publish, as they define them.

Spec-Bench (speed.py): mean accepted tokens are all tokens of all target steps by these steps, the
bonus token included, so plain decoding has 1; a task's speed is the mean over its questions of
tokens a second, its speedup that speed by plain decoding's. MT-Bench, HumanEval and GSM8K tables
of EAGLE (tau and speedup) are defined alike. Over rounds, the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from paceline.tools.bench.figures import complete
from paceline.tools.bench.methods import PLAIN
from paceline.tools.bench.outcome import TimedRun
from paceline.tools.bench.runner import Heat, HeatRecord
from paceline.tools.bench.suites import Suite

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

    def record(self) -> dict[str, Any]:
        return asdict(self)


def task_figures(suite: Suite, record: HeatRecord) -> list[TaskFigures]:
    """For each temperature, each task that was measured and overall, each method. A round that
    was cut short does not count."""
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

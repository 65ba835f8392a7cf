"""The figures that the public benchmarks publish, as they define them.

Spec-Bench (speed.py): mean accepted tokens are all tokens of all target steps by these steps, the
bonus token included, so plain decoding has 1; a task's speed is the mean over its questions of
tokens a second, its speedup that speed by plain decoding's. MT-Bench, HumanEval and GSM8K tables
of EAGLE (tau and speedup) are defined alike. Over rounds, the mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from paceline.tools.bench.conversations import Answered, Dialogue, SuiteRecord
from paceline.tools.bench.methods import PLAIN
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


def task_figures(suite: Suite, record: SuiteRecord) -> list[TaskFigures]:
    """For each temperature, each task that was measured and overall, each method."""
    found: list[TaskFigures] = []
    tasks = list(dict.fromkeys(suite.tasks.values()))
    for temperature in dict.fromkeys(done.temperature for done in record.answered):
        own = [done for done in record.answered if done.temperature == temperature]
        slices = [(task, [done for done in own if done.question.task == task]) for task in tasks]
        if len(tasks) > 1:
            slices.append((OVERALL, own))
        for task, answered in slices:
            rounds = _whole_rounds(answered)
            if rounds:
                found += [_figures(n, task, temperature, rounds) for n in rounds[0][0].dialogues]
    return found


def _whole_rounds(answered: Iterable[Answered]) -> list[list[Answered]]:
    """Those with as many questions as the fullest: one that was cut short does not count."""
    by_turn: dict[int, list[Answered]] = {}
    for done in answered:
        by_turn.setdefault(done.turn, []).append(done)
    full = max(map(len, by_turn.values()), default=0)
    return [own for own in by_turn.values() if len(own) == full]


def _figures(
    name: str, task: str, temperature: float, rounds: Sequence[Sequence[Answered]]
) -> TaskFigures:
    dialogues = [done.dialogues[name] for own in rounds for done in own]
    speeds = [mean(done.dialogues[name].rate for done in own) for own in rounds]
    plain = [mean(done.dialogues[PLAIN].rate for done in own) for own in rounds]
    return TaskFigures(
        method=name,
        task=task,
        temperature=temperature,
        questions=len(rounds[0]),
        turns=sum(len(done.dialogues[name].turns) for done in rounds[0]),
        tokens=sum(dialogue.tokens for dialogue in dialogues),
        tokens_per_second=mean(speeds),
        speedup=mean(own / base for own, base in zip(speeds, plain, strict=True)),
        mean_accepted_tokens=accepted_tokens(dialogues),
    )


def accepted_tokens(dialogues: Iterable[Dialogue]) -> float | None:
    """Tokens a target step, without the steps that read a prompt: heads cannot draft before."""
    tokens = steps = 0
    for dialogue in dialogues:
        for turn in dialogue.turns:
            first = turn.outcome.answers[0].arrivals[0][1]
            tokens += turn.outcome.tokens - first
            steps += turn.outcome.steps - 1
    return tokens / steps if steps else None

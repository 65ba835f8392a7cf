"""Whole conversations, answered turn by turn, as Spec-Bench and MT-Bench are decoded.

An answer becomes part of the conversation that the next turn continues: every contestant goes on
from its own. Only answering is timed; rendering and tokenising are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from paceline.budget import Budget
from paceline.core.params import SamplingParams
from paceline.tools.bench.figures import merged
from paceline.tools.bench.outcome import Ask, Contestant, TimedRun
from paceline.tools.bench.prompts import render
from paceline.tools.bench.runner import (
    BenchJob,
    Heat,
    HeatRecord,
    OnHeat,
    Sweep,
    take_turns,
    warm_up,
)
from paceline.tools.bench.suites import Question

if TYPE_CHECKING:
    from paceline.llm import LLM


@dataclass(frozen=True)
class SuiteDialogue(TimedRun):
    """A question as one run, an answer for each of the ``asks``; ``cut``: later turns had no room
    in the context."""

    asks: tuple[Ask, ...] = ()
    cut: bool = False


def dialogues(heat: Heat) -> dict[str, SuiteDialogue]:
    """Of a heat in which questions were answered."""
    return cast("dict[str, SuiteDialogue]", heat.outcomes)


def asked_alike(record: HeatRecord) -> HeatRecord:
    """The turns in which all contestants were asked the same, for comparing their texts."""
    heats = []
    for number, heat in enumerate(record.heats):
        found = dialogues(heat)
        for turn, asks in enumerate(zip(*(own.asks for own in found.values()), strict=False)):
            if all(ask == asks[0] for ask in asks):
                job = BenchJob(heat.job.category, 1, heat.job.temperature, number, asks[:1])
                answers = {n: TimedRun([own.answers[turn]], 0.0, 0) for n, own in found.items()}
                heats.append(Heat(job, heat.turn, answers))
    return HeatRecord(heats)


def fitting(questions: Sequence[Question], llm: LLM) -> tuple[list[Question], list[Question]]:
    """Those whose first turn leaves room for an answer, and the others."""
    kept: list[Question] = []
    left: list[Question] = []
    for question in questions:
        (kept if 0 < len(_first(llm, question)) < llm.max_model_len else left).append(question)
    return kept, left


def _first(llm: LLM, question: Question) -> list[int]:
    return render(llm, [*question.earlier, ("user", question.turns[0])])


def converse(
    llm: LLM, contestant: Contestant, question: Question, params: Callable[[int], SamplingParams]
) -> SuiteDialogue:
    """Answer all turns. ``params`` gets how many tokens there is room for."""
    messages = list(question.earlier)
    asks: list[Ask] = []
    runs: list[TimedRun] = []
    for said in question.turns:
        messages.append(("user", said))
        ids = render(llm, messages)
        remaining = llm.max_model_len - len(ids)
        if remaining < 1:
            break
        asks.append(Ask(tuple(ids), params(remaining)))
        runs.append(contestant.run(asks[-1:]))
        tokens = list(runs[-1].answers[0].tokens)
        text = llm.tokenizer.decode(tokens, skip_special_tokens=True)
        messages.append(("assistant", str(text).strip()))
    cut = len(asks) < len(question.turns)
    return SuiteDialogue(**vars(merged(runs)), asks=tuple(asks), cut=cut)


def answer_all(
    llm: LLM,
    contestants: Sequence[Contestant],
    questions: Sequence[Question],
    how: Sweep,
    record: HeatRecord,
    advance: OnHeat,
    budget: Budget | None = None,
) -> bool:
    """Every question by all contestants, see ``take_turns``; the record's outcomes are Dialogues.

    False if the time was up before all was done.
    """

    def answer(contestant: Contestant, job: BenchJob) -> SuiteDialogue:
        def params(room: int) -> SamplingParams:
            return how.settings.params(job.temperature, job.index, room)

        return converse(llm, contestant, questions[job.index], params)

    def first(place: int, temperature: float) -> Ask:
        ids = _first(llm, questions[place])
        room = llm.max_model_len - len(ids)
        return Ask(tuple(ids), how.settings.params(temperature, place, room))

    todo = {
        temperature: [
            BenchJob(question.task, 1, temperature, place, (first(place, temperature),))
            for place, question in enumerate(questions)
        ]
        for temperature in how.temperatures
    }
    warm_up([job for own in todo.values() for job in own], contestants)
    for turn in range(how.rounds):
        for own in todo.values():  # those of earlier rounds are in the record
            take_turns(own, contestants, turn + 1, record, advance, budget, True, answer)
    return len(record.heats) == how.rounds * len(how.temperatures) * len(questions)

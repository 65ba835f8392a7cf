"""Whole conversations, answered turn by turn, as Spec-Bench and MT-Bench are decoded.

An answer becomes part of the conversation that the next turn continues: every contestant goes on
from its own. Only answering is timed; rendering and tokenising are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.params import SamplingParams
from paceline.tools.bench.outcome import Ask, Contestant, TimedRun
from paceline.tools.bench.runner import BenchJob, Heat, HeatRecord, OnHeat
from paceline.tools.bench.suites import Question

if TYPE_CHECKING:
    from paceline.llm import LLM

_WARM_TOKENS = 16


@dataclass(frozen=True)
class Turn:
    """One answered turn."""

    ask: Ask
    outcome: TimedRun


@dataclass(frozen=True)
class Dialogue:
    """A question answered by one contestant. ``cut``: later turns had no room in the context."""

    turns: tuple[Turn, ...]
    cut: bool = False

    @property
    def tokens(self) -> int:
        return sum(turn.outcome.tokens for turn in self.turns)

    @property
    def seconds(self) -> float:
        return sum(turn.outcome.seconds for turn in self.turns)

    @property
    def rate(self) -> float:
        """Tokens a second over all turns."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Answered:
    """One question in one round, by all contestants."""

    question: Question
    temperature: float
    turn: int
    dialogues: dict[str, Dialogue]


@dataclass
class SuiteRecord:
    """What was answered so far; a question counts when all contestants are through with it."""

    answered: list[Answered] = field(default_factory=list)

    def texts(self) -> HeatRecord:
        """The turns in which all contestants were asked the same, for comparing their texts."""
        heats = []
        for number, done in enumerate(self.answered):
            for turns in zip(*(d.turns for d in done.dialogues.values()), strict=False):
                if all(turn.ask == turns[0].ask for turn in turns):
                    job = BenchJob(done.question.task, 1, done.temperature, number, (turns[0].ask,))
                    outcomes = dict(zip(done.dialogues, (t.outcome for t in turns), strict=True))
                    heats.append(Heat(job, done.turn, outcomes))
        return HeatRecord(heats)


@dataclass(frozen=True)
class Manner:
    """How questions are answered. ``seconds``: begin no question after so many."""

    max_tokens: int
    temperatures: Sequence[float]
    rounds: int
    ignore_eos: bool = False
    seed: int | None = None
    seconds: float | None = None

    def params(self, temperature: float, number: int, remaining: int) -> SamplingParams:
        seed = None if self.seed is None else (self.seed + number) % 2**63
        return SamplingParams(
            temperature=temperature,
            max_tokens=min(self.max_tokens, remaining),
            ignore_eos=self.ignore_eos,
            seed=seed if temperature > 0 else None,
        )


def render(llm: LLM, messages: Sequence[tuple[str, str]]) -> list[int]:
    """Through the chat template; a target without one gets the texts, a blank line between.

    Raises PromptError if the template refuses the conversation.
    """
    if llm.tokenizer.chat_template is not None:
        return llm.render_chat([{"role": role, "content": said} for role, said in messages])
    text = "\n\n".join(said for _, said in messages)
    return [int(token) for token in llm.tokenizer(text)["input_ids"]]


def fitting(questions: Sequence[Question], llm: LLM) -> tuple[list[Question], list[Question]]:
    """Those whose first turn leaves room for an answer, and the others."""
    kept: list[Question] = []
    left: list[Question] = []
    for question in questions:
        ids = render(llm, [*question.earlier, ("user", question.turns[0])])
        (kept if ids and len(ids) < llm.max_model_len else left).append(question)
    return kept, left


def converse(
    llm: LLM, contestant: Contestant, question: Question, params: Callable[[int], SamplingParams]
) -> Dialogue:
    """Answer all turns. ``params`` gets how many tokens there is room for."""
    messages = list(question.earlier)
    turns: list[Turn] = []
    for said in question.turns:
        messages.append(("user", said))
        ids = render(llm, messages)
        remaining = llm.max_model_len - len(ids)
        if remaining < 1:
            return Dialogue(tuple(turns), cut=True)
        ask = Ask(tuple(ids), params(remaining))
        outcome = contestant.run([ask])
        turns.append(Turn(ask, outcome))
        tokens = list(outcome.answers[0].tokens)
        text = llm.tokenizer.decode(tokens, skip_special_tokens=True)
        messages.append(("assistant", str(text).strip()))
    return Dialogue(tuple(turns))


def warm_up(llm: LLM, contestants: Sequence[Contestant], question: Question, how: Manner) -> None:
    """A short untimed answer of everybody: buffers, kernels, lazy imports."""
    short = Question(question.name, question.task, question.turns[:1], question.earlier)
    for temperature in how.temperatures:
        for contestant in contestants:
            converse(
                llm,
                contestant,
                short,
                lambda remaining, t=temperature: how.params(t, 0, min(remaining, _WARM_TOKENS)),  # type: ignore[misc]
            )


def answer_all(
    llm: LLM,
    contestants: Sequence[Contestant],
    questions: Sequence[Question],
    how: Manner,
    record: SuiteRecord,
    advance: OnHeat,
) -> bool:
    """Every question by all contestants, one after another; who begins changes with the question.

    Fills the record question by question; Ctrl-C passes through. False if the time was up before
    all was done. ``advance(1, what)`` is called before every dialogue but the first (0) and at the
    end.
    """
    start = time.perf_counter()
    warm_up(llm, contestants, questions[0], how)
    done = 0
    for turn in range(how.rounds):
        for temperature in how.temperatures:
            for contestant in contestants:
                contestant.refresh()
            for place, question in enumerate(questions):
                if how.seconds is not None and time.perf_counter() - start > how.seconds:
                    advance(min(done, 1), "the time is up")
                    return False
                shift = (turn + place) % len(contestants)
                found: dict[str, Dialogue] = {}
                for contestant in [*contestants[shift:], *contestants[:shift]]:
                    advance(min(done, 1), f"{question.task}: {contestant.name}")
                    found[contestant.name] = converse(
                        llm,
                        contestant,
                        question,
                        lambda remaining, t=temperature, n=place: how.params(t, n, remaining),  # type: ignore[misc]
                    )
                    done += 1
                ordered = {one.name: found[one.name] for one in contestants}
                record.answered.append(Answered(question, temperature, turn, ordered))
    advance(min(done, 1), "done")
    return True

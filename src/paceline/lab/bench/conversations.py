"""Whole conversations, answered turn by turn, as Spec-Bench and MT-Bench are decoded.

An answer becomes part of the conversation that the next turn continues: every engine goes on
from its own. Only answering is timed; rendering and tokenising are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path
from typing import cast

from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, DataError
from paceline.lab.bench.figures import merged
from paceline.lab.bench.methods import Method
from paceline.lab.bench.prompts import BenchPrompt, evenly, load_prompts, render
from paceline.lab.bench.runner import (
    BenchJob,
    Heat,
    HeatRecord,
    OnHeat,
    Sweep,
    in_turn,
)
from paceline.lab.bench.runs import Ask, BenchEngine, TimedRun
from paceline.lab.budget import Budget
from paceline.llm import LLM

# -- the public benchmarks' questions --------------------------------------------------------------
# Files are read in the benchmarks' own layouts or in that of docs/prompts.md. Spec-Bench's six
# tasks are named as in its leaderboard; the eight categories of MT-Bench are its first task.

_MT_BENCH = {
    "writing": "Writing",
    "roleplay": "Roleplay",
    "reasoning": "Reasoning",
    "math": "Math",
    "coding": "Coding",
    "extraction": "Extraction",
    "stem": "STEM",
    "humanities": "Humanities",
}
MULTI_TURN = "Multi-turn Conversation"
_SPEC_BENCH = {
    **dict.fromkeys(_MT_BENCH, MULTI_TURN),
    "translation": "Translation",
    "summarization": "Summarization",
    "qa": "Question Answering",
    "math_reasoning": "Mathematical Reasoning",
    "rag": "Retrieval-aug. Generation",
}
# What records of one task are called, by the benchmark itself, by us, or for want of a category.
_GSM8K = dict.fromkeys(("arithmetic", "math_word_problem", "math_reasoning", "gsm8k"), "GSM8K")
_HUMANEVAL = dict.fromkeys(("code", "code_completion", "coding", "humaneval"), "HumanEval")


@dataclass(frozen=True)
class Suite:
    """``tasks``: the column of every category; ``files``: names to look for in a folder."""

    name: str
    title: str
    tasks: dict[str, str]
    files: tuple[str, ...]


SUITES = {
    suite.name: suite
    for suite in (
        Suite("spec-bench", "Spec-Bench", _SPEC_BENCH, ("question.jsonl", "spec_bench.jsonl")),
        Suite("mt-bench", "MT-Bench", _MT_BENCH, ("question.jsonl", "mt_bench.jsonl")),
        Suite("gsm8k", "GSM8K", _GSM8K, ("test.jsonl", "gsm8k.jsonl")),
        Suite(
            "humaneval",
            "HumanEval",
            _HUMANEVAL,
            ("HumanEval.jsonl", "HumanEval.jsonl.gz", "humaneval.jsonl"),
        ),
    )
}


@dataclass(frozen=True)
class Question:
    """``turns`` are what the user says, one after another; each is answered before the next."""

    name: str
    task: str
    turns: tuple[str, ...]
    earlier: tuple[tuple[str, str], ...] = ()


def suite_of(name: str) -> Suite:
    """Raises ConfigError."""
    if name not in SUITES:
        raise ConfigError(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


def load_questions(
    suite: Suite, path: str | Path, categories: Sequence[str] = (), per_task: int | None = None
) -> list[Question]:
    """The suite's questions, its tasks taking turns: whenever a run ends, it has seen all alike.

    ``categories`` are the file's own; ``per_task`` takes so many of each task, evenly spread.
    Raises, in one line, DataError for a file that cannot be read or is of another benchmark.
    """
    file = _file_of(suite, Path(path))
    prompts = load_prompts(file, categories)
    by_task: dict[str, list[Question]] = {}
    for prompt in prompts:
        question = _question(suite, prompt, file)
        by_task.setdefault(question.task, []).append(question)
    tasks = dict.fromkeys(suite.tasks.values())
    chosen = [matching for task in tasks for matching in evenly(by_task.get(task, []), per_task)]
    return in_turn(chosen, lambda question: question.task)


def _file_of(suite: Suite, path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in suite.files:
        if (path / name).is_file():
            return path / name
    raise DataError(f"{path} has no {' or '.join(suite.files)}; name {suite.title}'s file itself")


def _question(suite: Suite, prompt: BenchPrompt, file: Path) -> Question:
    task = suite.tasks.get(prompt.category)
    if task is None:
        known = ", ".join(dict.fromkeys(suite.tasks))
        raise DataError(
            f"{file}: {prompt.name} is of category {prompt.category!r}, which {suite.title} does "
            f"not have ({known}); name {suite.title}'s file, or measure it with --prompts"
        )
    for number, turn in enumerate(prompt.turns, 1):
        if not turn.strip():
            raise DataError(f"{file}: turn {number} of {prompt.name} is empty; give it text")
    return Question(prompt.name, task, prompt.turns, prompt.earlier)


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
    """The turns in which all engines were asked the same, for comparing their texts."""
    heats = []
    for number, heat in enumerate(record.heats):
        by_question = dialogues(heat)
        for turn, asks in enumerate(
            zip(*(dialogue.asks for dialogue in by_question.values()), strict=False)
        ):
            if all(ask == asks[0] for ask in asks):
                job = BenchJob(heat.job.category, 1, heat.job.temperature, number, asks[:1])
                answers = {
                    n: TimedRun([dialogue.answers[turn]], 0.0, 0)
                    for n, dialogue in by_question.items()
                }
                heats.append(Heat(job, heat.turn, answers))
    return HeatRecord(heats)


def fitting(questions: Sequence[Question], llm: LLM) -> tuple[list[Question], list[Question]]:
    """Those whose first turn leaves room for an answer, and the others."""
    fits = [0 < len(_first(llm, question)) < llm.max_model_len for question in questions]
    return list(compress(questions, fits)), list(compress(questions, map(not_, fits)))


def _first(llm: LLM, question: Question) -> list[int]:
    return render(llm, [*question.earlier, ("user", question.turns[0])])


def converse(
    llm: LLM, engine: BenchEngine, question: Question, params: Callable[[int], SamplingParams]
) -> SuiteDialogue:
    """Answer all turns. ``params`` gets how many tokens a turn's prompt has."""
    messages = list(question.earlier)
    asks: list[Ask] = []
    runs: list[TimedRun] = []
    for turn in question.turns:
        messages.append(("user", turn))
        ids = render(llm, messages)
        if len(ids) >= llm.max_model_len:
            break
        asks.append(Ask(tuple(ids), params(len(ids))))
        runs.append(engine.run(asks[-1:]))
        tokens = list(runs[-1].answers[0].tokens)
        text = llm.tokenizer.decode(tokens, skip_special_tokens=True)
        messages.append(("assistant", str(text).strip()))
    cut = len(asks) < len(question.turns)
    return SuiteDialogue(**vars(merged(runs)), asks=tuple(asks), cut=cut)


def answer_all(
    llm: LLM,
    methods: Sequence[Method],
    start: Callable[[Method, int], BenchEngine],
    questions: Sequence[Question],
    how: Sweep,
    record: HeatRecord,
    advance: OnHeat,
    budget: Budget | None = None,
) -> bool:
    """Every question by all methods, see ``Sweep.run``; the record's outcomes are Dialogues.

    False if the time was up before all was done.
    """

    how = replace(how, settings=replace(how.settings, limit=llm.max_model_len))

    def answer(engine: BenchEngine, job: BenchJob) -> SuiteDialogue:
        params = partial(how.settings.params, job.temperature, job.index)
        return converse(llm, engine, questions[job.index], params)

    prompts = [(question.task, _first(llm, question)) for question in questions]
    how.run(prompts, methods, start, record, advance, budget=budget, answer=answer)
    return len(record.heats) == how.rounds * how.wanted(prompts)

"""Public benchmarks: their questions, in their layouts or that of docs/guides/prompts.md, answered
turn by turn. Engines go on from their own answers; only answering is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError, DataError
from paceline.lab.bench.prompts import BenchPrompt, evenly, in_turn, load_prompts, render
from paceline.lab.bench.runner import Sweep
from paceline.lab.bench.runs import Ask, BenchEngine, BenchJob, TimedRun, merged
from paceline.llm import LLM

# Spec-Bench's tasks as its leaderboard names them; the categories of MT-Bench are the first.
MULTI_TURN = "Multi-turn Conversation"
_CATEGORIES = "Writing Roleplay Reasoning Math Coding Extraction STEM Humanities"
_MT_BENCH = {name.lower(): name for name in _CATEGORIES.split()}
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
    """``tasks``: the column of every category."""

    name: str
    title: str
    tasks: dict[str, str]


_TITLES = {"Spec-Bench": _SPEC_BENCH, "MT-Bench": _MT_BENCH}
_TITLES |= {"GSM8K": _GSM8K, "HumanEval": _HUMANEVAL}
SUITES = {title.lower(): Suite(title.lower(), title, tasks) for title, tasks in _TITLES.items()}


def suite_of(name: str) -> Suite:
    """Raises ConfigError."""
    if name not in SUITES:
        raise ConfigError(f"there is no suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


def load_questions(
    suite: Suite, file: str | Path, categories: Sequence[str] = (), per_task: int | None = None
) -> list[BenchPrompt]:
    """The suite's questions, with their task as category, the tasks in turn. ``categories``: of the
    file. ``per_task`` takes so many of a task, evenly spread. Raises DataError for a file that
    cannot be read or is of another benchmark."""
    questions = [_question(suite, prompt, file) for prompt in load_prompts(file, categories)]
    chosen = [
        question
        for task in dict.fromkeys(suite.tasks.values())
        for question in evenly([q for q in questions if q.category == task], per_task)
    ]
    return in_turn(chosen, lambda question: question.category)


def _question(suite: Suite, prompt: BenchPrompt, file: str | Path) -> BenchPrompt:
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
    return replace(prompt, category=task, chat=True)


def converse(
    llm: LLM, questions: Sequence[BenchPrompt], sweep: Sweep, engine: BenchEngine, job: BenchJob
) -> TimedRun:
    """Answer all turns of the job's question; the sweep has the ``limit`` of the model."""
    question = questions[job.index]
    messages = list(question.earlier)
    runs: list[TimedRun] = []
    for turn in question.turns:
        messages.append(("user", turn))
        ids = render(llm, messages)
        if len(ids) >= llm.max_model_len:
            break
        ask = Ask(tuple(ids), sweep.params(job.temperature, job.index, len(ids)))
        runs.append(replace(engine.run([ask]), asks=(ask,)))
        tokens = list(runs[-1].answers[0].tokens)
        text = llm.tokenizer.decode(tokens, skip_special_tokens=True)
        messages.append(("assistant", str(text).strip()))
    return replace(merged(runs), cut=len(runs) < len(question.turns))

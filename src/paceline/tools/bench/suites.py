"""The public benchmarks of speculative decoding: their questions and how their tables group them.

Files are read in the benchmarks' own layouts or in that of docs/prompts.md. Spec-Bench's six tasks
are named as in its leaderboard; the eight categories of MT-Bench are its first task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError, DataError
from paceline.tools.bench.prompts import BenchPrompt, load_prompts

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
    columns = []
    for task in dict.fromkeys(suite.tasks.values()):
        own = by_task.get(task, [])
        count = len(own) if per_task is None else min(per_task, len(own))
        columns.append([own[n * len(own) // count] for n in range(count)])
    longest = max(map(len, columns))
    return [column[n] for n in range(longest) for column in columns if n < len(column)]


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

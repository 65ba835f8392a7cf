"""Public benchmarks: their files, their conversations, and figures as they define them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.sequence import DraftCounts
from paceline.errors import ConfigError, DataError
from paceline.lab.bench.prompts import MULTI_TURN, SUITES, BenchPrompt, load_questions, suite_of
from paceline.lab.bench.result import OVERALL, Row, rows
from paceline.lab.bench.runner import (
    Ask,
    BenchJob,
    Heat,
    HeatRecord,
    Sweep,
    TimedAnswer,
    TimedRun,
    converse,
    merged,
)
from support.made_outcomes import ask, outcome


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def spec_bench(path: Path) -> Path:
    """In Spec-Bench's own layout."""
    tasks = ("writing", "stem", "translation", "summarization", "qa", "math_reasoning", "rag")
    return lines(
        path,
        *(
            {
                "question_id": 81 + n,
                "category": task,
                "turns": [f"{task} {n}", "and then?"][: 2 - n % 2],
            }
            for n, task in enumerate(tasks * 2)
        ),
    )


# -- files ---------------------------------------------------------------------------------------


def test_spec_bench_has_six_tasks(tmp_path: Path) -> None:
    questions = load_questions(SUITES["spec-bench"], spec_bench(tmp_path / "question.jsonl"))
    tasks = [question.category for question in questions]
    assert tasks[:6] == [
        MULTI_TURN,
        "Translation",
        "Summarization",
        "Question Answering",
        "Mathematical Reasoning",
        "Retrieval-aug. Generation",
    ]  # they take turns, so that what is measured in part has all of them
    assert len(questions) == 14 and tasks.count(MULTI_TURN) == 4
    assert questions[0].turns == ("writing 0", "and then?")
    few = load_questions(SUITES["spec-bench"], tmp_path / "question.jsonl", per_task=1)
    assert [question.category for question in few] == tasks[:6]
    some = load_questions(SUITES["spec-bench"], tmp_path / "question.jsonl", ["stem", "qa"])
    assert {question.category for question in some} == {MULTI_TURN, "Question Answering"}


def test_the_other_suites_in_their_own_layouts(tmp_path: Path) -> None:
    mt = lines(tmp_path / "q.jsonl", {"question_id": 1, "category": "stem", "turns": ["a", "b"]})
    (question,) = load_questions(SUITES["mt-bench"], mt)
    assert (question.category, question.turns) == ("STEM", ("a", "b"))
    gsm = lines(tmp_path / "test.jsonl", {"question": "How many?", "answer": "4 #### 4"})
    (question,) = load_questions(SUITES["gsm8k"], gsm)
    assert (question.category, question.turns) == ("GSM8K", ("How many?",))
    code = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress((json.dumps(code) + "\n").encode()))
    (question,) = load_questions(SUITES["humaneval"], packed)
    assert (question.name, question.category) == ("HumanEval/0", "HumanEval")
    assert question.turns == ("def f():\n",)


def test_our_own_layout(tmp_path: Path) -> None:
    common = {"id": "x/1", "format": "chat", "turns": ["Go"]}
    for suite, category in (("gsm8k", "math_word_problem"), ("humaneval", "code_completion")):
        file = lines(tmp_path / f"{suite}.jsonl", common | {"category": category})
        assert len(load_questions(SUITES[suite], file)) == 1


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    file = lines(tmp_path / "mine.jsonl", {"id": "a/1", "category": "cooking", "turns": ["Fry"]})
    with pytest.raises(DataError, match="a/1 is of category 'cooking', which MT-Bench does not"):
        load_questions(SUITES["mt-bench"], file)
    empty = lines(tmp_path / "e.jsonl", {"category": "stem", "turns": ["Go", " "]})
    with pytest.raises(DataError, match="turn 2 of e/0 is empty"):
        load_questions(SUITES["mt-bench"], empty)
    with pytest.raises(DataError, match="is a folder; give one file of prompts"):
        load_questions(SUITES["gsm8k"], tmp_path)
    with pytest.raises(DataError, match="no prompt file"):
        load_questions(SUITES["gsm8k"], tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="no suite 'alpaca'; there are spec-bench, mt-bench"):
        suite_of("alpaca")


# -- conversations -------------------------------------------------------------------------------


class Letters:
    """A tokenizer of one token a letter, no chat template; token 0 is special."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(n) for n in ids if n)


class Echo:
    """Says its name and ends; one step a token."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, list[Ask]()

    def refresh(self) -> None:
        self.asked = []

    def run(self, asks: Any) -> TimedRun:
        self.asked += asks
        tokens = (*(ord(letter) for letter in self.name), 0)[: asks[0].params.max_tokens]
        arrivals = tuple((float(n), 1) for n, _ in enumerate(tokens, 1))
        return TimedRun(
            [TimedAnswer(tokens, arrivals)], float(len(tokens)), DraftCounts(len(tokens))
        )


def llm(remaining: int = 1000) -> Any:
    return SimpleNamespace(tokenizer=Letters(), max_model_len=remaining)


def said(one: Ask) -> str:
    return "".join(map(chr, one.prompt))


JOB = BenchJob("STEM", 1, 0.0, 0, (ask(1, tokens=10),))


def question(*turns: str, earlier: tuple[tuple[str, str], ...] = ()) -> BenchPrompt:
    return BenchPrompt("q", "STEM", turns[0], True, turns, earlier)


def test_an_answer_becomes_part_of_the_conversation() -> None:
    asked = question("one", "two", "three", earlier=(("system", "be"),))
    dialogue = converse(llm(), [asked], Echo("yes"), JOB)
    assert [said(one) for one in dialogue.asks] == [
        "be\n\none",
        "be\n\none\n\nyes\n\ntwo",
        "be\n\none\n\nyes\n\ntwo\n\nyes\n\nthree",
    ]
    assert (dialogue.tokens, dialogue.seconds, dialogue.rate) == (12, 12.0, 1.0)
    assert not dialogue.cut


def test_a_turn_without_room_ends_the_conversation() -> None:
    dialogue = converse(llm(5), [question("one", "two")], Echo("yes"), JOB)
    assert [one.params.max_tokens for one in dialogue.asks] == [2] and dialogue.cut


def test_sampled_requests_get_seeds_of_their_own() -> None:
    how = Sweep(100, seed=5)
    assert how.params(0.0, 2).seed is None
    params = how.params(1.0, 2)
    assert (params.seed, params.max_tokens, params.temperature) == (7, 100, 1.0)


# -- figures -------------------------------------------------------------------------------------


def dialogue(*turns: tuple[float, list[int]]) -> TimedRun:
    """Turns of (seconds, tokens of each step); the first step reads the prompt."""
    made = []
    for seconds, steps in turns:
        arrivals = tuple((float(n), count) for n, count in enumerate(steps, 1))
        made.append(replace(outcome(seconds, arrivals), asks=(ask(1),)))
    return merged(made)


def figures(record: HeatRecord) -> dict[tuple[str, str], Row]:
    return {(row.method, row.category): row for row in rows(record)}


def answered(
    task: str, turn: int, plain: float, fast: float, steps: list[int], index: int = 0
) -> Heat:
    dialogues = {
        "plain": dialogue((plain, [1] * sum(steps))),
        "ngram": dialogue((fast, steps)),
    }
    return Heat(BenchJob(task, 1, 0.0, index, (ask(1),)), turn, dialogues)


def test_mean_accepted_tokens_are_pooled_over_steps() -> None:
    def accepted(*runs: TimedRun) -> float | None:
        heats = [Heat(BenchJob("a", 1, 0.0, n, ()), 0, {"plain": r}) for n, r in enumerate(runs)]
        return figures(HeatRecord(heats))["plain", "a"].drafts["mean_accepted_tokens"]

    plain = dialogue((4.0, [1, 1, 1, 1]), (2.0, [1, 1]))
    assert accepted(plain) == 1.0
    fast = dialogue((1.0, [1, 3]), (1.0, [2, 4, 2]))
    assert accepted(fast) == 3.0  # 9 tokens in 3 steps that only decode
    assert accepted(fast, plain) == (9 + 4) / (3 + 4)
    assert accepted(dialogue((1.0, [1]))) is None


def test_speedup_is_the_mean_speed_by_plain_decodings() -> None:
    record = HeatRecord(
        [
            answered("Translation", 0, 4.0, 2.0, [1, 3]),  # 1 and 2 tokens a second
            answered("Translation", 0, 2.0, 0.5, [1, 3], 1),  # 2 and 8
            answered("Question Answering", 0, 5.0, 5.0, [1, 1, 1, 1, 1]),  # 1 and 1
            answered("Translation", 1, 4.0, 4.0, [1, 3]),  # a round that was cut short
        ]
    )
    by_method = figures(record)
    translation = by_method["ngram", "Translation"]
    assert translation.heats == 2
    assert translation.mean_speedup == pytest.approx(5.0 / 1.5)
    assert translation.speedup.median == pytest.approx(6 / 2.5)  # the ratio of the sums
    assert translation.drafts["mean_accepted_tokens"] == 3.0
    whole = by_method["ngram", OVERALL]
    assert whole.mean_speedup == pytest.approx((2 + 8 + 1) / 3 / ((1 + 2 + 1) / 3))
    assert whole.drafts["mean_accepted_tokens"] == (3 + 3 + 4) / (1 + 1 + 4)
    assert by_method["plain", OVERALL].mean_speedup == 1.0
    assert ("ngram", "Summarization") not in by_method  # nothing was measured of it


def test_one_task_needs_no_overall() -> None:
    record = HeatRecord(
        [answered("GSM8K", 0, 4.0, 2.0, [1, 3]), answered("GSM8K", 1, 4.0, 1.0, [1, 3])]
    )
    by_method = figures(record)
    assert list(by_method) == [("plain", "GSM8K"), ("ngram", "GSM8K")]
    assert by_method["ngram", "GSM8K"].mean_speedup == 3.0  # the median of 2 and 4

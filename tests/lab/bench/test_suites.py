"""Public benchmarks: their files, their conversations, and figures as they define them."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ConfigError, DataError
from paceline.lab.bench.conversations import (
    MULTI_TURN,
    SUITES,
    Question,
    SuiteDialogue,
    answer_all,
    asked_alike,
    converse,
    fitting,
    load_questions,
    suite_of,
)
from paceline.lab.bench.figures import merged
from paceline.lab.bench.methods import Method
from paceline.lab.bench.runner import BenchJob, Heat, HeatRecord, Settings, Sweep
from paceline.lab.bench.runs import Ask, TimedAnswer, TimedRun
from paceline.lab.bench.suite_tables import OVERALL, accepted_tokens, task_figures
from paceline.lab.budget import Budget
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
    tasks = [question.task for question in questions]
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
    few = load_questions(SUITES["spec-bench"], tmp_path, per_task=1)  # a folder: its file is found
    assert [question.task for question in few] == tasks[:6]
    some = load_questions(SUITES["spec-bench"], tmp_path, ["stem", "qa"])
    assert {question.task for question in some} == {MULTI_TURN, "Question Answering"}


def test_the_other_suites_in_their_own_layouts(tmp_path: Path) -> None:
    mt = lines(tmp_path / "q.jsonl", {"question_id": 1, "category": "stem", "turns": ["a", "b"]})
    (question,) = load_questions(SUITES["mt-bench"], mt)
    assert (question.task, question.turns) == ("STEM", ("a", "b"))
    gsm = lines(tmp_path / "test.jsonl", {"question": "How many?", "answer": "4 #### 4"})
    (question,) = load_questions(SUITES["gsm8k"], gsm)
    assert (question.task, question.turns) == ("GSM8K", ("How many?",))
    code = {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}
    packed = tmp_path / "HumanEval.jsonl.gz"
    packed.write_bytes(gzip.compress((json.dumps(code) + "\n").encode()))
    (question,) = load_questions(SUITES["humaneval"], tmp_path)
    assert (question.name, question.task) == ("HumanEval/0", "HumanEval")
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
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"has no test.jsonl or gsm8k.jsonl; name GSM8K's file"):
        load_questions(SUITES["gsm8k"], tmp_path / "folder")
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
        return TimedRun([TimedAnswer(tokens, arrivals)], float(len(tokens)), steps=len(tokens))


def llm(remaining: int = 1000) -> Any:
    return SimpleNamespace(tokenizer=Letters(), max_model_len=remaining)


def said(one: Ask) -> str:
    return "".join(map(chr, one.prompt))


def test_an_answer_becomes_part_of_the_conversation() -> None:
    echo = Echo("yes")
    question = Question("q", "STEM", ("one", "two", "three"), (("system", "be"),))
    how = Settings(10, ignore_eos=False, limit=1000)
    dialogue = converse(llm(), echo, question, partial(how.params, 0.0, 0))
    assert [said(one) for one in dialogue.asks] == [
        "be\n\none",
        "be\n\none\n\nyes\n\ntwo",
        "be\n\none\n\nyes\n\ntwo\n\nyes\n\nthree",
    ]
    assert (dialogue.tokens, dialogue.seconds, dialogue.rate) == (12, 12.0, 1.0)
    assert not dialogue.asks[0].params.ignore_eos and not dialogue.cut


def test_a_turn_without_room_ends_the_conversation() -> None:
    question = Question("q", "STEM", ("one", "two"))
    how = Settings(10, limit=5)
    dialogue = converse(llm(5), Echo("yes"), question, partial(how.params, 0.0, 0))
    assert [one.params.max_tokens for one in dialogue.asks] == [2] and dialogue.cut
    kept, left = fitting([question, Question("long", "STEM", ("onetwo",))], llm(5))
    assert [one.name for one in kept] == ["q"] and [one.name for one in left] == ["long"]


def test_engines_take_turns_and_go_on_from_their_own_answers() -> None:
    questions = [Question(str(n), "STEM", (f"{n}", "more")) for n in range(2)]
    a, b, record = Echo("a"), Echo("b"), HeatRecord()
    told: list[str] = []
    how = Sweep([1], [0.0], 2, Settings(4))
    methods = [Method("a"), Method("b")]

    def start(method: Method, clients: int) -> Any:
        assert clients == 1
        return {"a": a, "b": b}[method.name]

    def tell(_: int, what: str) -> None:
        told.append(what)

    assert answer_all(llm(), methods, start, questions, how, record, tell)
    assert told == [
        *("loading a", "loading b", "warming up"),
        *(f"STEM: {n}" for n in "abbabaab"),
        "done",
    ]
    assert [heat.turn for heat in record.heats] == [0, 0, 1, 1]
    assert [said(one) for one in b.asked[:2]] == ["0", "0\n\nb\n\nmore"]
    # The second turns differ, so only the first ones can be compared.
    texts = asked_alike(record)
    assert [said(heat.job.asks[0]) for heat in texts.heats] == ["0", "1", "0", "1"]
    assert texts.names() == ["a", "b"]
    late = Budget(-1.0)
    assert not answer_all(llm(), methods, start, questions, how, HeatRecord(), tell, late)


def test_sampled_requests_get_seeds_of_their_own() -> None:
    how = Settings(100, seed=5, limit=60)
    assert how.params(0.0, 2, 10).seed is None
    params = how.params(1.0, 2, 10)
    assert (params.seed, params.max_tokens, params.temperature) == (7, 50, 1.0)


# -- figures -------------------------------------------------------------------------------------


def dialogue(*turns: tuple[float, list[int]]) -> SuiteDialogue:
    """Turns of (seconds, tokens of each step); the first step reads the prompt."""
    made = []
    for seconds, steps in turns:
        arrivals = tuple((float(n), count) for n, count in enumerate(steps, 1))
        made.append(outcome(seconds, arrivals))
    return SuiteDialogue(**vars(merged(made)), asks=(ask(1),) * len(made))


def test_mean_accepted_tokens_are_pooled_over_steps() -> None:
    plain = dialogue((4.0, [1, 1, 1, 1]), (2.0, [1, 1]))
    assert accepted_tokens([plain]) == 1.0
    fast = dialogue((1.0, [1, 3]), (1.0, [2, 4, 2]))
    assert accepted_tokens([fast]) == 3.0  # 9 tokens in 3 steps that only decode
    assert accepted_tokens([fast, plain]) == (9 + 4) / (3 + 4)
    assert accepted_tokens([dialogue((1.0, [1]))]) is None


def answered(task: str, turn: int, plain: float, fast: float, steps: list[int]) -> Heat:
    dialogues = {
        "plain": dialogue((plain, [1] * sum(steps))),
        "ngram": dialogue((fast, steps)),
    }
    return Heat(BenchJob(task, 1, 0.0, 0, (ask(1),)), turn, dict(dialogues))


def test_speedup_is_the_mean_speed_by_plain_decodings() -> None:
    record = HeatRecord(
        [
            answered("Translation", 0, 4.0, 2.0, [1, 3]),  # 1 and 2 tokens a second
            answered("Translation", 0, 2.0, 0.5, [1, 3]),  # 2 and 8
            answered("Question Answering", 0, 5.0, 5.0, [1, 1, 1, 1, 1]),  # 1 and 1
            answered("Translation", 1, 4.0, 4.0, [1, 3]),  # a round that was cut short
        ]
    )
    rows = {(r.method, r.task): r for r in task_figures(SUITES["spec-bench"], record)}
    translation = rows["ngram", "Translation"]
    assert translation.tokens_per_second == 5.0 and translation.questions == 2
    assert translation.speedup == pytest.approx(5.0 / 1.5)  # not the ratio of the sums, 6 / 2.5
    assert translation.mean_accepted_tokens == 3.0
    whole = rows["ngram", OVERALL]
    assert whole.speedup == pytest.approx((2 + 8 + 1) / 3 / ((1 + 2 + 1) / 3))
    assert whole.mean_accepted_tokens == (3 + 3 + 4) / (1 + 1 + 4)
    assert rows["plain", OVERALL].speedup == 1.0
    assert ("ngram", "Summarization") not in rows  # nothing was measured of it


def test_rounds_are_averaged_and_one_task_needs_no_overall() -> None:
    record = HeatRecord(
        [answered("GSM8K", 0, 4.0, 2.0, [1, 3]), answered("GSM8K", 1, 4.0, 1.0, [1, 3])]
    )
    rows = task_figures(SUITES["gsm8k"], record)
    assert [(row.method, row.task) for row in rows] == [("plain", "GSM8K"), ("ngram", "GSM8K")]
    assert rows[1].speedup == 3.0 and rows[1].tokens_per_second == 3.0
    assert task_figures(SUITES["gsm8k"], HeatRecord()) == []

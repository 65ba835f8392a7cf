"""``paceline bench --suite``: published tables, JSON, reports and bad input."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.lab.bench.engines import Starter
from support.command_lines import paceline
from support.made_outcomes import Fake
from support.tiny_models import TinyPair

TASKS = ("writing", "translation", "summarization", "qa", "math_reasoning", "rag")


run = partial(paceline, "bench", COLUMNS="200")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """One of each task, the first with two turns."""
    records = [
        {
            "question_id": n,
            "category": task,
            "turns": [f"{task} one two", "one two"][: 2 if n == 0 else 1],
        }
        for n, task in enumerate(TASKS)
    ]
    file = tmp_path / "question.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def pair_of(pair: TinyPair) -> list[str]:
    return ["--model", pair.target, "--draft", pair.draft, "--dtype", "float32"]


def test_spec_bench_in_full(tiny_pair: TinyPair, questions: Path, tmp_path: Path) -> None:
    report = tmp_path / "suite.md"
    result = run(
        *("--suite", "spec-bench", str(questions), *pair_of(tiny_pair), "--max-tokens", "16"),
        *("-m", "draft@3", "-m", "ngram@2", "--allow-idle", "--json", "--report", str(report)),
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["suite"] == "spec-bench" and record["bugs"] == []
    assert record["budget"]["missing"] == []
    settings = record["settings"]
    assert (settings["concurrency"], settings["rounds"]) == ([1], 1)
    assert settings["ignore_eos"] is False
    figures = {(row["method"], row["category"]): row for row in record["figures"]}
    assert {task for _, task in figures} == {
        *("Multi-turn Conversation", "Translation", "Summarization", "Question Answering"),
        *("Mathematical Reasoning", "Retrieval-aug. Generation", "overall"),
    }
    assert figures["plain", "Multi-turn Conversation"]["requests"] == 2
    whole = figures["draft@3", "overall"]
    assert whole["heats"] == 6 and whole["requests"] == 7 and whole["mean_speedup"] > 0
    assert figures["plain", "overall"]["drafts"]["mean_accepted_tokens"] in (1.0, None)
    assert figures["plain", "overall"]["mean_speedup"] == 1.0
    text = report.read_text(encoding="utf-8")
    head = "| method | Multi-turn Conversation | Translation | Summarization | Question Answering"
    assert head in text and "overall |" in text and "#Mean accepted tokens" in text
    assert "turn by turn, batch 1" in text and "the bonus token is counted" in text


def fakes(monkeypatch: pytest.MonkeyPatch, **engines: Fake) -> None:
    monkeypatch.setattr(Starter, "open", lambda self, method, clients: engines[method.name])


def test_a_suite_of_one_task(
    tiny_pair: TinyPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test.jsonl"
    file.write_text('{"question": "one two", "answer": "3 #### 3"}\n' * 3)
    fast = Fake("ngram", seconds=0.5, drafted=3, accepted=2)
    fakes(monkeypatch, plain=Fake("plain"), ngram=fast)
    shown = run("--suite", "gsm8k", *pair_of(tiny_pair), "-m", "ngram", "--prompts", str(file))
    assert shown.exit_code == 0, shown.output
    assert "GSM8K at temperature 0" in shown.stdout and "2.00x" in shown.stdout
    assert "Multi-turn" not in shown.stdout and "3 prompts from" in shown.stdout
    again = run(
        *("--suite", "gsm8k", str(file), *pair_of(tiny_pair), "-m", "ngram", "--json"),
        *("--rounds", "2", "--temperature", "0,1", "--per-category", "2"),
    )
    record = json.loads(again.stdout)
    assert record["settings"]["max_tokens"] == 1024 and record["settings"]["rounds"] == 2
    assert [row["heats"] for row in record["figures"]] == [2] * 4


def test_a_lie_and_an_idle_method_fail_the_run(
    tiny_pair: TinyPair, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes(monkeypatch, plain=Fake("plain"), ngram=Fake("ngram", tokens=(5, 6, 7, 9)))
    result = run("--suite", "spec-bench", str(questions), *pair_of(tiny_pair), "-m", "ngram")
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "ngram wrote another text than plain decoding" in errors[0]
    assert "ngram drafted nothing in the whole run" in errors[1]


def test_ctrl_c_shows_what_was_complete(
    tiny_pair: TinyPair, questions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = Fake("ngram", drafted=2, accepted=1, interrupted_at=4)  # warm-up, two turns, then
    fakes(monkeypatch, plain=Fake("plain"), ngram=last)
    arguments = ("--suite", "spec-bench", str(questions), *pair_of(tiny_pair), "-m", "ngram")
    result = run(*arguments, "--json")
    assert result.exit_code == 130
    record = json.loads(result.stdout)
    assert record["interrupted"] and record["budget"]["done"] != record["budget"]["wanted"]
    assert {row["category"] for row in record["figures"]} == {"Multi-turn Conversation"}
    last.interrupted_at, last.runs = 1, 0
    result = run(*arguments, "--json")
    assert result.exit_code == 130 and result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--suite", "alpaca", "FILE"], "no suite 'alpaca'; there are spec-bench, mt-bench, gsm8k"),
        (["--suite", "spec-bench"], "needs the file of its questions: paceline bench --suite"),
        (["FILE"], "measured with --prompts"),
        (["--suite", "spec-bench", "FILE", "--prompts", "x.jsonl"], "needs the file of its"),
        (["--suite", "spec-bench", "FILE", "--concurrency", "4"], "has batch 1, as published"),
        (["--suite", "spec-bench", "FILE", "-m", "ngrm"], "no method 'ngrm'; there are plain"),
        (["--suite", "spec-bench", "FILE", "--category", "cooking"], "no category cooking in"),
        (["--suite", "spec-bench", "/nowhere.jsonl"], "no prompt file /nowhere.jsonl"),
        (["--suite", "mt-bench", "FILE"], "is of category 'translation', which MT-Bench does not"),
        (["--suite", "spec-bench", "FILE", "--report", "x.pdf"], ".md or .html"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, questions: Path) -> None:
    result = run(*(str(questions) if part == "FILE" else part for part in arguments))
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and "unexpected" not in line
    assert words in line


def test_questions_that_do_not_fit(tiny_pair: TinyPair, tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    long: dict[str, Any] = {"question": "one two three " * 200}
    file.write_text(json.dumps(long) + "\n")
    result = run("--suite", "gsm8k", str(file), *pair_of(tiny_pair), "-m", "ngram")
    assert result.exit_code == 1
    assert "all 1 prompts are too long" in result.stderr.strip().splitlines()[-1]
    file.write_text(json.dumps(long) + '\n{"question": "one two"}\n')
    arguments = ("--suite", "gsm8k", str(file), *pair_of(tiny_pair), "--max-tokens", "4")
    both = json.loads(run(*arguments, "-m", "ngram@2", "--allow-idle", "--json").stdout)
    assert both["prompts_left_out"] == ["test/0"] and both["settings"]["prompts"] == 2

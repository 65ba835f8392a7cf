"""Prompts for a target, and the records of what it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embedded_target import train_tokenizer
from paceline import DataError, SamplingParams
from paceline.train.configs import PromptSelection
from paceline.train.data import encode_stream
from paceline.train.prompts import FOLLOW_UPS, AnswerWriter, NumberedPrompt, load_prompts
from paceline.train.records import Source
from support.tiny_models import SENTENCES

TOKENIZER = train_tokenizer(SENTENCES, 320)
END = TOKENIZER.convert_tokens_to_ids("<|end|>")


class Echo:
    """An LLM that answers one prompt a step, in turn."""

    tokenizer = TOKENIZER

    def __init__(self, finish: str = "stop") -> None:
        self.finish = finish
        self.seen: list[list[int]] = []

    def stream(self, prompts: list[list[int]], params: SamplingParams) -> Iterator[Any]:
        self.seen += prompts
        for request, token_ids in enumerate(prompts):
            words = TOKENIZER.encode(f"answer {len(token_ids)}", add_special_tokens=False)
            ids = [] if self.finish == "error" else [*words, END]
            done = SimpleNamespace(token_ids=ids, finish_reason=self.finish)
            for completion in (None, done):
                yield SimpleNamespace(request=request, completion=completion)


def prompts(folder: Path, *records: Any) -> list[Source]:
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return [Source(file, 1.0)]


def question(text: str) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "license": "MIT", "source": "us"}


def write(
    jobs: list[NumberedPrompt], llm: Any, kept: tuple[str, ...] = (), max_prompt: int = 99
) -> list[dict[str, Any]]:
    lines: list[str] = []
    writer = AnswerWriter(llm, SamplingParams(temperature=0.5), max_prompt, lines.append)
    writer.write(jobs, 2, kept)
    return [json.loads(line) for line in lines]


def test_every_question_is_answered_once_and_reads_back(tmp_path: Path) -> None:
    sources = prompts(tmp_path, *(question(f"What is {n}?") for n in range(9)))
    jobs = load_prompts(sources, TOKENIZER, PromptSelection())
    assert jobs == load_prompts(sources, TOKENIZER, PromptSelection())
    records = write(jobs, Echo())
    assert sorted(record["job"] for record in records) == list(range(9))
    for record in records:
        asked = f"<|endoftext|><|user|>What is {record['job']}?<|end|><|assistant|>"
        assert record["text"] == f"{asked}answer {record['prompt']}<|end|>"
        assert (record["license"], record["source"], record["finish"]) == ("MIT", "us", "stop")
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    stream = encode_stream(file, TOKENIZER)
    assert TOKENIZER.decode(stream.ids) == "".join(record["text"] for record in records)
    said = TOKENIZER.decode(stream.ids[stream.loss_mask])
    assert said == "".join(f"answer {record['prompt']}<|end|>" for record in records)


def test_prompts_of_like_length_are_decoded_together(tmp_path: Path) -> None:
    sources = prompts(tmp_path, *(question("the dog " * (n % 8)) for n in range(8)))
    llm = Echo()
    write(load_prompts(sources, TOKENIZER, PromptSelection()), llm)
    lengths = [len(ids) for ids in llm.seen]
    assert lengths == sorted(lengths)


def test_so_many_prompts_and_none_that_are_too_long(tmp_path: Path) -> None:
    sources = prompts(tmp_path, question("the dog " * 40), *map(question, "abcdef"))
    jobs = load_prompts(sources, TOKENIZER, PromptSelection(max_prompt_len=20))
    assert len(jobs) == 6
    few = load_prompts(sources, TOKENIZER, PromptSelection(num_prompts=3, max_prompt_len=20))
    assert len(few) == 3
    assert {job.number for job in few} <= {job.number for job in jobs}
    with pytest.raises(DataError, match=r"no prompt that can be answered: line 1: it has \d+ tok"):
        load_prompts(sources, TOKENIZER, PromptSelection(max_prompt_len=2))
    with pytest.raises(DataError, match="no prompt that can be answered: it is empty; give"):
        load_prompts(prompts(tmp_path), TOKENIZER, PromptSelection())


def test_questions_of_several_turns_are_asked_to_the_end(tmp_path: Path) -> None:
    sources = prompts(tmp_path, {"question_id": 1, "turns": ["One?", "Two?", "Three?"]})
    records = write(load_prompts(sources, TOKENIZER, PromptSelection()), Echo())
    assert [record["turn"] for record in records] == [1, 2, 3]
    assert records[2]["text"].startswith(records[1]["text"] + "<|user|>Three?<|end|>")
    cut = write(load_prompts(sources, TOKENIZER, PromptSelection()), Echo(finish="length"))
    assert len(cut) == 1  # an answer without an end is not asked about
    long = write(load_prompts(sources, TOKENIZER, PromptSelection()), Echo(), max_prompt=20)
    assert len(long) == 1


def test_a_share_of_the_answers_is_asked_about(tmp_path: Path) -> None:
    sources = prompts(tmp_path, *(question(f"What is {n}?") for n in range(100)))
    jobs = load_prompts(sources, TOKENIZER, PromptSelection(follow_ups=0.3))
    later = [job.conversation.next_questions for job in jobs if job.conversation is not None]
    asked = [questions[0] for questions in later if questions]
    assert 15 <= len(asked) <= 45
    assert set(asked) <= set(FOLLOW_UPS)
    records = write(jobs, Echo(), max_prompt=200)
    assert sum(record["turn"] == 2 for record in records) == len(asked)


@pytest.mark.parametrize("cut", range(7))
def test_a_run_goes_on_where_it_stopped(tmp_path: Path, cut: int) -> None:
    """After any number of records: what remains is written, also further questions."""
    sources = prompts(
        tmp_path, question("One?"), {"question_id": 1, "turns": ["A?", "B?", "C?"]}, question("Z?")
    )
    jobs = load_prompts(sources, TOKENIZER, PromptSelection())
    whole = write(jobs, Echo())
    kept = tuple(json.dumps(record) for record in whole[:cut])
    rest = write(jobs, Echo(), kept)

    def keys(records: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
        return sorted((r["job"], r["turn"], r["text"]) for r in records)

    assert keys(whole[:cut] + rest) == keys(whole)


def test_answers_that_fail_are_no_records(tmp_path: Path) -> None:
    jobs = load_prompts(prompts(tmp_path, question("One?")), TOKENIZER, PromptSelection())
    llm: Any = Echo(finish="error")
    writer = AnswerWriter(llm, SamplingParams(), 99, lambda line: pytest.fail(line))
    writer.write(jobs, 2)
    assert writer.failed == 1


def test_texts_are_continued_and_conversations_in_texts_opened(tmp_path: Path) -> None:
    texts = [{"text": text, "license": "MIT"} for text in SENTENCES]
    selection = PromptSelection(num_prompts=3, max_text_len=12)
    jobs = load_prompts(prompts(tmp_path, *texts), TOKENIZER, selection)
    assert len(jobs) == 3
    assert all(len(job.token_ids) == 12 for job in jobs)
    assert jobs == load_prompts(prompts(tmp_path, *texts), TOKENIZER, selection)
    assert all(job.source.startswith("continued from") for job in jobs)

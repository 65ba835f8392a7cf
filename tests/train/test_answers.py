"""Prompts for a target, and the records of what it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embedded_target import train_tokenizer
from paceline import DataError, SamplingParams
from paceline.train.configs import PromptSelection
from paceline.train.data import encode_stream
from paceline.train.prompts import AnswerWriter, NumberedPrompt, load_prompts
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


def write(jobs: list[NumberedPrompt], llm: Any, kept: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    lines: list[str] = []
    writer = AnswerWriter(llm, SamplingParams(temperature=0.5), lines.append)
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


@pytest.mark.parametrize("wanted", [1, 2, 4, 7])
def test_the_shares_of_files_add_up(tmp_path: Path, wanted: int) -> None:
    (source,) = prompts(tmp_path, *map(question, "abcdef"))
    sources = [replace(source, weight=weight) for weight in (1.0, 1.0, 1.0, 0.5)]
    assert len(load_prompts(sources, TOKENIZER, PromptSelection(num_prompts=wanted))) == wanted


@pytest.mark.parametrize("cut", range(4))
def test_a_run_goes_on_where_it_stopped(tmp_path: Path, cut: int) -> None:
    """After any number of records: what remains is written."""
    asked = {"question_id": 1, "turns": ["A?", "B?"]}  # the first question is
    jobs = load_prompts(
        prompts(tmp_path, question("One?"), asked, question("Z?")), TOKENIZER, PromptSelection()
    )
    whole = write(jobs, Echo())
    assert len(whole) == 3 and not any("B?" in record["text"] for record in whole)
    kept = tuple(json.dumps(record) for record in whole[:cut])
    rest = write(jobs, Echo(), kept)

    def keys(records: list[dict[str, Any]]) -> list[tuple[int, str]]:
        return sorted((r["job"], r["text"]) for r in records)

    assert keys(whole[:cut] + rest) == keys(whole)


def test_answers_that_fail_are_no_records(tmp_path: Path) -> None:
    jobs = load_prompts(prompts(tmp_path, question("One?")), TOKENIZER, PromptSelection())
    llm: Any = Echo(finish="error")
    writer = AnswerWriter(llm, SamplingParams(), lambda line: pytest.fail(line))
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

"""Openings of texts and conversations, for a target to go on from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embedded_target import train_tokenizer
from paceline.errors import DataError
from paceline.train.configs import PromptSelection
from paceline.train.prompts import NumberedPrompt, load_file_prompts
from paceline.train.records import Source
from support.tiny_models import SENTENCES

TOKENIZER = train_tokenizer(SENTENCES, 320)
CHAT = "User: What is 12 + 30?\n\nAssistant: It is 42.\n\nUser: And 1 + 1?\n\nAssistant: 2."


def corpus(folder: Path, texts: list[str]) -> Source:
    file = folder / "text.jsonl"
    file.write_text("".join(json.dumps({"text": t, "license": "MIT"}) + "\n" for t in texts))
    return Source(file, 1.0)


def answer_positions(source: Source, count: int, **more: int) -> list[NumberedPrompt]:
    """As held-out texts are opened."""
    selection = PromptSelection(num_prompts=count, **more)  # type: ignore[arg-type]
    return load_file_prompts(source, TOKENIZER, selection, (1,), any_turn=True)


def test_openings_are_beginnings_of_records(tmp_path: Path) -> None:
    source = corpus(tmp_path, SENTENCES)
    found = answer_positions(source, 4, max_text_len=14)
    assert len(found) == 4
    whole = [TOKENIZER.encode(text) for text in SENTENCES]
    for opening in found:
        assert 12 <= len(opening.token_ids) <= 14
        assert any(ids[: len(opening.token_ids)] == opening.token_ids for ids in whole)
    assert found == answer_positions(source, 4, max_text_len=14)


def test_conversations_are_opened_up_to_an_answer(tmp_path: Path) -> None:
    (opening,) = answer_positions(corpus(tmp_path, [CHAT]), 1)
    text = TOKENIZER.decode(opening.token_ids)
    assert text.endswith("<|end|><|assistant|>")
    assert "It is 42" not in text or "And 1 + 1?" in text


def test_questions_and_prompts_are_opened_whole(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    ids = TOKENIZER.encode("What is 12 + 30?")
    for record, expected in (
        ({"turns": ["What is 12?", "And?"], "question_id": 1}, "<|user|>What is 12?<|end|>"),
        ({"messages": [{"role": "user", "content": "Hi."}]}, "<|user|>Hi.<|end|>"),
    ):
        file.write_text(json.dumps(record) + "\n")
        (opening,) = answer_positions(Source(file, 1.0), 1)
        assert TOKENIZER.decode(opening.token_ids) == f"<|endoftext|>{expected}<|assistant|>"
    file.write_text(json.dumps({"ids": [*ids, 9, 9], "prompt": len(ids)}) + "\n")
    (opening,) = answer_positions(Source(file, 1.0), 1)
    assert opening.token_ids == ids
    file.write_text(json.dumps({"ids": [*range(20)]}) + "\n")  # all of them as a text
    (opening,) = answer_positions(Source(file, 1.0), 1)
    assert opening.token_ids == [*range(len(opening.token_ids))]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ids": [1, 2, 10**6, 4]}, "outside the vocabulary"),
        ({"ids": [1, -2, 3, 4]}, "outside the vocabulary"),
        ({"ids": {"a": 1}}, "not a list of whole numbers"),
        ({"prompt": -2}, "must be a number at most the number of ids"),
        ({"prompt": 50}, "must be a number at most the number of ids"),
    ],
)
def test_ids_that_are_no_prompt_are_an_error(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(json.dumps({"ids": [1, 2, 3, 4], "prompt": 3} | changes) + "\n")
    with pytest.raises(DataError, match=why):
        answer_positions(Source(file, 1.0), 1)


def test_long_conversations_are_opened_where_they_are_wanted(tmp_path: Path) -> None:
    source = corpus(tmp_path, [f"User: {'word ' * 90}\n\nAssistant: yes"])
    with pytest.raises(DataError, match="more than --max-prompt-len"):
        answer_positions(source, 1, max_prompt_len=192)
    (opening,) = answer_positions(source, 1)
    assert len(opening.token_ids) > 192


def test_records_that_are_too_short_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="prefix of 12"):
        answer_positions(corpus(tmp_path, ["hi"]), 1)

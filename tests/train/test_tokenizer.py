"""The byte-level tokenizer and its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedded_target import END_OF_TEXT, SPECIAL_TOKENS, chat_text, train_tokenizer
from support.tiny_models import SENTENCES


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(SENTENCES, 300)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_any_unicode_comes_back(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_vocabulary(tokenizer: Any) -> None:
    assert len(tokenizer) == 300
    assert tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(len(SPECIAL_TOKENS)))


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("1234567", add_special_tokens=False)
    assert [tokenizer.decode([token]) for token in ids] == list("1234567")


def test_chat_template_is_what_training_sees(tokenizer: Any) -> None:
    document = (
        "User: What is 2 + 2?\n\nIt is easy.\n\nAssistant: 4\n\nUser: Thanks!\n\nAssistant: :)"
    )
    messages = [
        {"role": "user", "content": "What is 2 + 2?\n\nIt is easy."},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": ":)"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == END_OF_TEXT + chat_text({"text": document})
    asked = tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked)
    assert asked.endswith("<|assistant|>")


def test_chat_template_ids_hold_the_special_tokens(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert ids.count(tokenizer.bos_token_id) == 1
    kinds = tokenizer.convert_ids_to_tokens(ids)
    assert [kinds[0], kinds[1], kinds[-2], kinds[-1]] == [
        "<|endoftext|>",
        "<|user|>",
        "<|end|>",
        "<|assistant|>",
    ]


def test_unknown_roles_are_refused(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="unknown role oracle"):
        tokenizer.apply_chat_template([{"role": "oracle", "content": "x"}])


def test_it_survives_saving(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.chat_template == tokenizer.chat_template
    text = "Lily said: 12 + 3 = 15 😀"
    assert again.encode(text) == tokenizer.encode(text)

"""Streamed text: never a cut character, never a leaked stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.text import TextStream, held_back
from paceline.train.tokenizer import train_tokenizer
from tiny_models import SENTENCES

TOKENIZER = train_tokenizer(SENTENCES, 320)


def stream(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    out = TextStream(TOKENIZER, stops)
    pieces = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        done = out.push(token)
        pieces.append(out.take())
        if done:
            break
    pieces.append(out.finish())
    return pieces, out


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    pieces, out = stream(text)
    whole = TOKENIZER.decode(
        TOKENIZER.encode(text, add_special_tokens=False), skip_special_tokens=True
    )
    assert "".join(pieces) == out.text == whole


def test_multi_byte_characters_come_whole() -> None:
    pieces, _ = stream("héllo wörld 你好 🙂!")
    assert "".join(pieces) == "héllo wörld 你好 🙂!"
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["dog", "og and", "lazy dog, ", "x"])
def test_nothing_of_a_stop_string_leaks(stop: str) -> None:
    text = "the lazy dog and the dog, the lazy dog, x"
    pieces, out = stream(text, (stop,))
    assert out.stopped
    assert "".join(pieces) == text[: text.index(stop)]


def test_the_first_of_several_stop_strings_counts() -> None:
    pieces, _ = stream("one two three", ("three", "two"))
    assert "".join(pieces) == "one "


def test_an_unfinished_stop_string_is_shown_in_the_end() -> None:
    pieces, out = stream("it ends with do", ("dog",))
    assert not out.stopped
    assert "".join(pieces) == "it ends with do"


def test_held_back() -> None:
    assert held_back("abc", ("cd",)) == 1
    assert held_back("abc", ("abcd", "cx")) == 3
    assert held_back("abc", ("x",)) == 0


def test_min_tokens_come_before_stop_strings() -> None:
    ids = TOKENIZER.encode("dog dog dog", add_special_tokens=False)
    out = TextStream(TOKENIZER, ("dog",), min_tokens=len(ids))
    assert [out.push(token) for token in ids][:-1] == [False] * (len(ids) - 1)

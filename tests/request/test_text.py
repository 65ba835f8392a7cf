"""Streamed text: never a cut character, never a leaked stop string, always what a decode gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.request.text import Spelling, TextStream, first_stop, longest_overlap
from support.made_tokenizers import KINDS, TOKENIZER, decode, tokens_of

FROM_THE_START = KINDS["llama"]


def common(left: str, right: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def run(out: TextStream, tokens: Sequence[int], every: int = 1) -> list[str]:
    """What is shown when it is taken after every so many tokens."""
    pieces = []
    for place, token in enumerate(tokens):
        done = out.push(token)
        if done or place % every == 0:
            pieces.append(out.take())
        if done:
            break
    return [*pieces, out.finish()]


def cut(text: str, stops: Sequence[str]) -> str:
    """Up to the stop string that is complete first, the longest of those."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, length = min(ends, default=(len(text), 0))
    return text[: end + length]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_what_a_decode_gives(kind: str, data: st.DataObject) -> None:
    tokens, skip = data.draw(tokens_of(kind)), data.draw(st.booleans())
    out = TextStream(KINDS[kind], skip_special=skip)
    pieces = run(out, tokens, data.draw(st.integers(1, 3)))
    assert "".join(pieces) == out.text == decode(kind, tokens, skip)
    assert out.stop is None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_prompt_and_text_are_what_a_decode_of_both_gives(kind: str, data: st.DataObject) -> None:
    prompt, tokens = data.draw(tokens_of(kind, 60)), data.draw(tokens_of(kind))
    out = TextStream(KINDS[kind], prompt=prompt)
    pieces = run(out, tokens)
    before, whole = decode(kind, prompt), decode(kind, prompt + tokens)
    assert "".join(pieces) == out.text == whole[common(before, whole) :]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_text_ends_before_the_first_stop_string(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(tokens_of(kind))
    whole = decode(kind, tokens)
    ends = st.integers(0, len(whole))
    inside = st.tuples(ends, ends).map(lambda at: whole[min(at) : max(at)])
    stops = data.draw(st.lists(st.one_of(inside, st.text(max_size=2)).filter(bool), max_size=3))
    out = TextStream(KINDS[kind], stops)
    pieces = run(out, tokens)
    assert "".join(pieces) == out.text
    if out.stop is None:
        assert out.text == whole and not any(stop in whole for stop in stops)
        return
    # A run of bytes can be text that stops, and become another one if it is read to its end.
    firsts = [decode(kind, tokens[:end]) for end in range(len(tokens) + 1)]
    texts = [text for text in [*firsts, whole] if any(stop in text for stop in stops)]
    assert out.text in {cut(text, stops) for text in texts}


@settings(max_examples=120, deadline=None)
@given(st.text(max_size=40))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    out = TextStream(TOKENIZER)
    assert "".join(run(out, ids)) == out.text == TOKENIZER.decode(ids, skip_special_tokens=True)


def stream(text: str, stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    out = TextStream(TOKENIZER, stops)
    return run(out, TOKENIZER.encode(text, add_special_tokens=False)), out


def test_multi_byte_characters_come_whole() -> None:
    pieces, _ = stream("héllo wörld 你好 🙂!")
    assert "".join(pieces) == "héllo wörld 你好 🙂!"
    assert not any("\ufffd" in piece for piece in pieces)


def ids_of(*names: str) -> list[int]:
    return [int(FROM_THE_START.get_vocab()[name]) for name in names]


def test_a_continuation_keeps_its_space() -> None:
    for prompt, text in ((["▁world", "x"], " world"), (["<s>"], "world"), ([], "world")):
        out = TextStream(FROM_THE_START, prompt=ids_of(*prompt))
        assert "".join(run(out, ids_of("▁world"))) == text


def test_a_prompt_that_ends_inside_a_character() -> None:
    out = TextStream(FROM_THE_START, prompt=ids_of("x", "<0xE4>", "<0xBD>"))
    assert "".join(run(out, ids_of("<0xA0>", "x"))) == "你x"


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    pieces = run(
        TextStream(FROM_THE_START), ids_of("x", "world", "<0x0A>", "x", "<0xFF>", "<0xFE>")
    )
    assert pieces == ["x", "world", "", "\nx", "", "", "\ufffd\ufffd"]
    many = run(TextStream(KINDS["byte level"]), [KINDS["byte level"].get_vocab()["x"]] * 5)
    assert many == ["x"] * 5 + [""]


def test_bytes_stop_where_the_stop_string_is_complete() -> None:
    """The next token may not be waited for, though it could make something else of the bytes."""
    out = TextStream(FROM_THE_START, ("\n",))
    assert [out.push(token) for token in ids_of("x", "<0x0A>")] == [False, True]
    assert out.finish() == out.text == "x"
    out = TextStream(FROM_THE_START, ("x\n",), prompt=ids_of("x", "<0x0A>"))
    assert [out.push(token) for token in ids_of("<0x0A>", "x", "<0x0A>")] == [False, False, True]
    assert out.text == "\n"


def test_a_stop_string_that_only_the_end_completes() -> None:
    out = TextStream(FROM_THE_START, ("\ufffd",))
    assert [out.push(token) for token in ids_of("x", "<0xE4>")] == [False, False]
    assert out.finish() == out.text == "x"
    assert out.stop


@pytest.mark.parametrize("stop", ["dog", "og and", "lazy dog, ", "x"])
def test_nothing_of_a_stop_string_leaks(stop: str) -> None:
    text = "the lazy dog and the dog, the lazy dog, x"
    pieces, out = stream(text, (stop,))
    assert out.stop
    assert "".join(pieces) == text[: text.index(stop)]


def test_the_first_of_several_stop_strings_counts() -> None:
    pieces, _ = stream("one two three", ("three", "two"))
    assert "".join(pieces) == "one "


def test_an_unfinished_stop_string_is_shown_in_the_end() -> None:
    pieces, out = stream("it ends with do", ("dog",))
    assert out.stop is None
    assert "".join(pieces) == "it ends with do"


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    st.lists(st.text("abc", max_size=6), max_size=6),
)
@example(["abab", "ba"], ["aba", "c", "abab"])
def test_stop_strings_are_found_in_whatever_pieces(stops: list[str], pieces: list[str]) -> None:
    text, left, begin = "", 0, None
    for piece in pieces:
        settled, text = len(text) - left, text + piece
        found = first_stop(text[settled:], stops)
        if found is not None:
            begin = settled + found[0]
            break
        left = longest_overlap(text[settled:], stops)
        possible = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        assert left == max(possible, default=0)
    assert text[:begin] == cut(text, stops)


def test_time_is_linear_in_long_stop_strings() -> None:
    """Counted, not timed: how often the end of the text is held against a stop string."""

    class Counted(str):
        compared = 0

        def startswith(self, *args: Any) -> bool:
            Counted.compared += 1
            return str.startswith(self, *args)

    stop = Counted("a" * 1000 + "b")
    Counted.compared, text, left = 0, "", 0
    for _ in range(2000):
        text = text[len(text) - left :] + "a" * 5
        assert first_stop(text, [stop]) is None
        left = longest_overlap(text, [stop])
    assert 2000 <= Counted.compared < 10_000
    assert left == 1000


def test_min_tokens_come_before_stop_strings() -> None:
    ids = TOKENIZER.encode("dog dog dog", add_special_tokens=False)
    out = TextStream(TOKENIZER, ("dog",), min_tokens=len(ids))
    assert [out.push(token) for token in ids][:-1] == [False] * (len(ids) - 1)
    line = ids_of("<0x0A>")
    out = TextStream(FROM_THE_START, ("\n",), min_tokens=2)
    assert [out.push(token) for token in line * 2] == [False, True]
    assert out.finish() == out.text == "\n"
    out = TextStream(FROM_THE_START, ("\n",), min_tokens=2)
    assert not any(out.push(token) for token in line + ids_of("x"))
    assert out.finish() == out.text == "\nx"


@pytest.mark.parametrize("kind", ["byte level", "llama", "gemma", "trained"])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_the_bytes_of_tokens_are_those_of_the_text(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(tokens_of(kind))
    spelling = Spelling.of(KINDS[kind])
    raw = b"".join(map(spelling.bytes_of, tokens))
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return
    whole = decode(kind, tokens, skip=False)
    assert whole == (text.removeprefix(" ") if kind == "llama" else text)

"""How a text may end: with its stop string, without half a character, without end tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.request.text import TextStream
from support.made_tokenizers import KINDS, decode, tokens_of

LLAMA, GPT = KINDS["llama"], KINDS["byte level"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_only_half_a_character_is_left_out(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(tokens_of(kind))
    out = TextStream(KINDS[kind])
    out.consume(tokens)
    text = out.take() + out.finish(whole=True)
    expected = decode(kind, tokens, True)
    if not expected.endswith("\ufffd"):
        assert text == expected
    else:  # a run of bytes keeps its characters, where a decode gives up all of it
        assert text.startswith(expected.rstrip("\ufffd"))


def test_whole_characters_of_a_run_that_is_cut() -> None:
    word = "🙂é".encode() + "你".encode()[:2]
    tokens = [LLAMA.get_vocab()[f"<0x{byte:02X}>"] for byte in word]
    out = TextStream(LLAMA, prompt=[LLAMA.get_vocab()["x"]])
    out.consume(tokens)
    assert out.take() + out.finish(whole=True) == "🙂é"
    again = TextStream(LLAMA, prompt=[LLAMA.get_vocab()["x"]])
    again.consume(tokens)
    assert again.take() + again.finish() == "\ufffd" * len(word)


@pytest.mark.parametrize("streams", [1, 3, 100])
def test_the_stop_string_can_be_shown(streams: int) -> None:
    vocabulary = GPT.get_vocab()
    tokens = [vocabulary[letter] for letter in "abcabdxyz"]
    for stops, expected in ((("abd",), "abcabd"), (("bda", "ca", "cab"), "abca"), (("q",), None)):
        for shown in (True, False):
            out = TextStream(GPT, stops, include_stop=shown)
            pieces = []
            for place, token in enumerate(tokens, 1):
                done = out.push(token)
                if done or place % streams == 0:
                    pieces.append(out.take())
                if done:
                    break
            text = "".join(pieces) + out.finish()
            whole = expected or "abcabdxyz"
            hidden = whole[: len(whole) - len(next((s for s in stops if whole.endswith(s)), ""))]
            assert text == out.text == (whole if shown or expected is None else hidden)


def test_end_tokens_that_are_written_over() -> None:
    """Where special tokens mark calls, those that end a text still are none of it."""
    llm = LLM("paceline/tiny", draft="none", dtype="float32")
    end = min(llm.end_tokens)
    fields = {"max_tokens": 2, "logit_bias": {end: 100.0}, "ignore_eos": True}
    name = llm.tokenizer.convert_ids_to_tokens([end])[0]
    for more, text in (({}, name * 2), ({"skip_end_tokens": True}, "")):
        params = SamplingParams(**fields, skip_special_tokens=False, **more)
        assert llm.generate("Hello", params)[0].text == text

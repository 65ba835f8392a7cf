"""Log-probabilities and origins of tokens: of whole answers and of any pieces of them the same."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams, TokenLogprob
from paceline.request.completion import StreamEvent
from paceline.request.text import TextStream
from paceline.server.api.choices import LogprobColumns, TokenOrigins, token_records
from support.made_tokenizers import KINDS, decode, tokens_of

LLAMA, GPT = KINDS["llama"], KINDS["byte level"]


def entries(tokens: Sequence[int]) -> list[TokenLogprob]:
    return [TokenLogprob(token, -1.0, ((token, -1.0), (2, -2.0))) for token in tokens]


def parts(tokens: list[int], cuts: set[int]) -> list[list[int]]:
    ends = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    return [tokens[a:b] for a, b in zip(ends, [*ends[1:], len(tokens)], strict=True) if a < b]


def event_of(tokens: list[int], reason: str | None) -> StreamEvent:
    done: Any = None if reason is None else SimpleNamespace(finish_reason=reason)
    return StreamEvent(0, 0, "", tokens, [False] * len(tokens), done)


CUTS = st.sets(st.integers(0, 30), max_size=8)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), cuts=CUTS)
def test_columns_do_not_depend_on_chunks(kind: str, data: st.DataObject, cuts: set[int]) -> None:
    prompt, tokens = data.draw(tokens_of(kind, 8)), data.draw(tokens_of(kind))
    whole = LogprobColumns(KINDS[kind], prompt).columns(entries(tokens))
    stream = LogprobColumns(KINDS[kind], prompt)
    chunks = [stream.columns(entries(part)) for part in parts(tokens, cuts)]
    for name, column in whole.items():
        assert [item for chunk in chunks for item in chunk[name]] == column


@pytest.mark.parametrize("kind", ["byte level", "llama", "gemma", "word piece", "trained"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_offsets_say_where_tokens_begin(kind: str, data: st.DataObject) -> None:
    tokens = data.draw(tokens_of(kind))
    offsets = LogprobColumns(KINDS[kind], ()).columns(entries(tokens))["text_offset"]
    for position, offset in enumerate(offsets):
        before = decode(kind, tokens[:position])
        if "\ufffd" not in before:
            assert offset == len(before)


def test_offsets_inside_a_character() -> None:
    vocabulary = GPT.get_vocab()
    ids = [vocabulary[name] for name in ("ä½", "ł", "x", "Ġworld", "x")]  # e4 bd, a0
    columns = LogprobColumns(GPT, ()).columns(entries(ids))
    assert columns["text_offset"] == [0, 0, 1, 2, 8]
    assert columns["tokens"] == ["bytes:\\xe4\\xbd", "bytes:\\xa0", "x", " world", "x"]


def test_tokens_have_their_own_bytes() -> None:
    def token_record(tokenizer: Any, entry: TokenLogprob) -> dict[str, Any]:
        event = StreamEvent(0, 0, "", [entry.token_id], [False], logprobs=[entry])
        return token_records(tokenizer, event, SamplingParams())[0]

    half = GPT.get_vocab()["ä½"]
    record = token_record(GPT, TokenLogprob(half, -1.0, ((half, -1.0),)))
    assert (record["token"], record["bytes"]) == ("\\xe4\\xbd", [0xE4, 0xBD])
    assert record["top_logprobs"][0]["bytes"] == [0xE4, 0xBD]
    for name, text in (("▁world", " world"), ("<0x0A>", "\n"), ("你", "你"), ("</s>", "</s>")):
        entry = TokenLogprob(LLAMA.get_vocab()[name], -1.0, ())
        assert token_record(LLAMA, entry)["bytes"] == list(text.encode())
        assert token_record(LLAMA, entry)["token"] == text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("visible", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data(), cuts=CUTS)
def test_origins_put_together_are_the_text(
    kind: str, visible: bool, data: st.DataObject, cuts: set[int]
) -> None:
    tokens = data.draw(tokens_of(kind))
    params = SamplingParams(skip_special_tokens=not visible)
    stream = TokenOrigins(KINDS[kind], (), params)
    chunks = parts(tokens, cuts)
    records = [
        record
        for count, part in enumerate(chunks, 1)
        for record in stream.records(event_of(part, "length" if count == len(chunks) else None))
    ]
    whole = TokenOrigins(KINDS[kind], (), params).records(event_of(tokens, "length"))
    assert records == whole
    text = TextStream(KINDS[kind], skip_special=not visible)
    text.consume(tokens)
    text.finish(whole=True)
    assert "".join(record["text"] for record in records) == text.text


@pytest.mark.parametrize("included", [False, True])
def test_the_end_token_is_no_text_unless_it_is_asked_for(included: bool) -> None:
    ids = [LLAMA.get_vocab()[name] for name in ("x", "<s>", "</s>")]
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=included)
    records = TokenOrigins(LLAMA, (), params).records(event_of(ids, "stop"))
    assert [record["text"] for record in records] == ["x", "<s>", "</s>" if included else ""]

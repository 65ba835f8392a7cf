"""A request's text: streamed, whole, and what a decode of prompt and answer gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.batch import Commit
from paceline.core.params import MAX_STOP_LENGTH, MAX_STOPS, SamplingParams
from paceline.core.sequence import SequenceState
from paceline.errors import ConfigError
from paceline.request.request import Request
from support.made_tokenizers import KINDS, decode, tokens_of


def answer(
    kind: str, prompt: list[int], steps: list[list[int]], params: SamplingParams, streams: bool
) -> tuple[Request, str]:
    """Commits as the engine makes them: up to the token at which the text says stop."""
    seq = SequenceState(0, list(prompt), len(prompt), params, stop_ids=frozenset({1}))
    request = Request(seq, prompt, 0, 0, KINDS[kind], streams)
    for place, step in enumerate(steps, 1):
        end = None if seq.stops is None else seq.stops.consume(step)
        reason = "stop" if end is not None else "length" if place == len(steps) else None
        seq.tokens += step[:end]
        request.apply_commit(Commit(0, tuple(step[:end]), finish_reason=reason))
        if reason is not None:
            break
    return request, "".join(event.text for event in request.events)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_streamed_and_whole_are_one_text(kind: str, data: st.DataObject) -> None:
    prompt = data.draw(tokens_of(kind)) or [2]
    steps = data.draw(st.lists(tokens_of(kind, 5).filter(bool), min_size=1, max_size=4))
    params = SamplingParams(
        stop=data.draw(st.sampled_from([(), ("x",), ("\n", "\ufffd"), (" w", "x \n")])),
        skip_special_tokens=data.draw(st.booleans()),
    )
    streamed, pieces = answer(kind, prompt, steps, params, streams=True)
    whole, _ = answer(kind, prompt, steps, params, streams=False)
    assert streamed.completion is not None and whole.completion is not None
    assert pieces == streamed.completion.text == whole.completion.text
    assert streamed.completion.finish_reason == whole.completion.finish_reason
    assert streamed.completion.token_ids == whole.completion.token_ids
    stopped = streamed.completion.finish_reason == "stop"
    assert not any(stop in pieces for stop in params.stop)
    if not stopped and params.skip_special_tokens:
        before, both = decode(kind, prompt), decode(kind, prompt + streamed.completion.token_ids)
        if both.startswith(before):
            assert before + pieces == both


def test_a_continuation_reads_on() -> None:
    ids = KINDS["llama"].get_vocab()
    for streams in (False, True):
        request, _ = answer(
            "llama", [0, ids["▁world"], ids["x"]], [[ids["▁world"]]], SamplingParams(), streams
        )
        assert request.completion is not None
        assert request.completion.text == " world"


def test_stop_strings_have_bounds() -> None:
    SamplingParams(stop=("x" * MAX_STOP_LENGTH,) * MAX_STOPS)
    with pytest.raises(ConfigError, match="1001 characters; 1000 are the most"):
        SamplingParams(stop="x" * (MAX_STOP_LENGTH + 1))
    with pytest.raises(ConfigError, match="17 strings; give at most 16"):
        SamplingParams(stop=("x",) * (MAX_STOPS + 1))

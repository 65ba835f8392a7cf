"""The messages between the two processes: whole, typed, and harmless if they are not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.params import Grammar, SamplingParams, TokenLogprob
from paceline.errors import (
    CacheMemoryError,
    ConfigError,
    GrammarError,
    PacelineError,
    PromptError,
)
from paceline.request.completion import Completion, CompletionStats, StreamEvent
from paceline.server.config import ServeConfig
from paceline.server.failures import (
    as_api_error,
    deadline_exceeded,
    engine_lost,
    queue_full,
    request_failed,
    shutting_down,
)
from paceline.server.wire import (
    REPLIES,
    REQUESTS,
    Done,
    Ended,
    SetAdapter,
    StepEvents,
    Submit,
    encode_message,
    read_message,
    read_message_async,
)

PARAMS = SamplingParams(
    temperature=0.5,
    logit_bias={5: -1.5, 7: 2},
    stop=("a", "größer"),
    stop_token_ids=(3,),
    seed=2**63 - 1,
    logprobs=3,
    grammar=Grammar.json({"type": "object"}),
    drafter="ngram",
)


def test_requests_arrive_as_they_were_sent() -> None:
    for message in (
        Submit(7, [[1, 2], [3]], PARAMS, True),
        Submit(8, [[0]], SamplingParams(), False),
        Submit(9, [[0]], SamplingParams(lora="sql"), False),
        SetAdapter(10, "sql", "/a/folder"),
        SetAdapter(11, "sql", None),
    ):
        assert REQUESTS.decode(encode_message(message)[4:]) == message
    config = ServeConfig(draft=("ngram", "suffix"), draft_length=3, cors_origin=("*",))
    assert msgspec.msgpack.decode(encode_message(config)[4:], type=ServeConfig) == config


def test_answers_arrive_as_they_were_sent() -> None:
    logprobs = [TokenLogprob(1, -0.5, ((1, -0.5), (2, float("-inf"))))]
    stats = CompletionStats(3, 1, 0.3, 2.0, [0.5], 2, 0.1, 20.0, arrivals=[(0.1, 2)])
    done = Completion("", "å🙂", [1, 2], logprobs, "stop", 2, [True, False], stats)
    event = StreamEvent(0, 2, "å🙂", [1], [True], done, logprobs)
    step = StepEvents([(1, event), (2, StreamEvent(0, 0, "", [], []))])
    assert REPLIES.decode(encode_message(step)[4:]) == step


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (queue_full(), 429, "queue_full"),
        (deadline_exceeded(True), 408, "deadline_exceeded"),
        (deadline_exceeded(False), 504, "deadline_exceeded"),
        (shutting_down("over"), 503, "shutting_down"),
        (engine_lost(), 503, "engine_lost"),
        (request_failed("not a law"), 500, "request_failed"),
        (PromptError("too long"), 400, None),
        (ConfigError("wrong"), 400, None),
        (GrammarError("no schema"), 400, "invalid_schema"),
        (CacheMemoryError("too small"), 400, "context_length_exceeded"),
        (PacelineError("plain"), 400, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_keep_what_clients_are_told(
    error: PacelineError, status: int, code: str | None
) -> None:
    data = encode_message(Ended(1, as_api_error(error)))
    decoded = REPLIES.decode(data[4:]).error
    assert (decoded.status, decoded.code, str(decoded)) == (status, code, str(error))
    assert vars(decoded) == vars(as_api_error(error))


def test_other_errors_keep_their_secrets() -> None:
    for error in (ValueError("a secret"), KeyError("a secret")):
        decoded = REPLIES.decode(encode_message(Ended(1, as_api_error(error)))[4:]).error
        assert decoded.status == 500 and "secret" not in str(decoded)
    # A message may quote half a surrogate pair.
    encode_message(Ended(1, as_api_error(ConfigError("'\ud800' is no text"))))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=8), st.data())
def test_messages_stay_whole_however_they_are_cut(sizes: list[int], data: st.DataObject) -> None:
    messages = [Done(number, "x" * size) for number, size in enumerate(sizes)]
    stream = b"".join(map(encode_message, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))

    async def read() -> list[Any]:
        reader, received = asyncio.StreamReader(), []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            asyncio.get_running_loop().call_soon(reader.feed_data, stream[start:end])
        asyncio.get_running_loop().call_soon(reader.feed_eof)
        while (body := await read_message_async(reader)) is not None:
            received.append(REPLIES.decode(body))
        return received

    assert asyncio.run(read()) == messages
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(stream)
        theirs.shutdown(socket.SHUT_WR)
        received = list(iter(lambda: read_message(ours), None))
    assert [REPLIES.decode(body) for body in received if body is not None] == messages
    assert read_message(ours) is None  # closed by now

"""Bodies that mean harm: every field, with every wrong thing that JSON can say. Never a 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM
from paceline.server.api import protocol
from paceline.server.api.anthropic import MessagesRequest
from paceline.server.api.responses_api import ResponsesRequest
from support.asking import ask
from support.running_server import MODEL, Running, serve, service_of

LONG = "9" * 5000  # more digits than Python reads
DEEP = '{"a":' * 900 + "1" + "}" * 900
ARRAYS = "[" * 100_000
# Raw JSON, as much of it is what json.dumps would not write.
VALUES = (
    "null",
    "true",
    "-1",
    "0.5",
    LONG,
    "9" * 40,
    "1e308",
    "1e400",
    "NaN",
    "-Infinity",
    '""',
    '"5"',
    r'"\ud800"',
    r'"\u0000\udfff"',
    '"\u0665\u202e\U0001f600"',
    "[]",
    "[[]]",
    "[null]",
    "[true]",
    "[-1]",
    f"[{'9' * 40}]",
    r'["\ud800"]',
    f"[{','.join(['1'] * 100_000)}]",
    "{}",
    r'{"\ud800": 1}',
    f'{{"{LONG}": 1}}',
    '{"5": NaN}',
    '{"type": "json_schema", "json_schema": {"schema": {"enum": ["\\ud800"]}}}',
    f'{{"type": "json_schema", "json_schema": {{"schema": {DEEP}}}}}',
    DEEP,
    ARRAYS,
)
MESSAGES = '[{"role": "user", "content": "Hi"}]'
BODIES = {
    "/v1/completions": (protocol.CompletionRequest, {"prompt": '"Once"', "max_tokens": "2"}),
    "/v1/chat/completions": (
        protocol.ChatRequest,
        {"messages": MESSAGES, "max_tokens": "2"},
    ),
    "/v1/responses": (ResponsesRequest, {"input": '"Hi"', "max_output_tokens": "2"}),
    "/v1/messages": (MessagesRequest, {"messages": MESSAGES, "max_tokens": "2"}),
    "/tokenize": (protocol.TokenizeRequest, {}),
    "/detokenize": (protocol.DetokenizeRequest, {}),
}
# What all requests have in common is tried of one of them.
FIELDS = [
    (path, name)
    for path, (kind, _) in BODIES.items()
    for name in kind.model_fields
    if path == "/v1/completions" or name not in protocol.Generation.model_fields
]


@pytest.fixture(scope="module")
def server(target: LLM) -> Iterator[Running]:
    llm = target.with_draft(["paceline/tiny-draft", "ngram"], draft_length=2, max_batch_size=8)
    service = service_of(llm, deadline=20.0, log_prompts=True)
    yield from serve(service)


def post(server: Running, path: str, body: str | bytes) -> tuple[int, Any]:
    answer = ask(server.url, path, body if isinstance(body, bytes) else body.encode())
    streamed = answer.status == 200 and "json" not in (answer.headers["Content-Type"] or "")
    return answer.status, answer.text if streamed else answer.json


def judge(status: int, body: Any) -> None:
    assert status == 200 or 400 <= status < 500, (status, body)
    if status != 200:
        error = body["error"]
        anthropic = body.get("type") == "error"
        assert set(error) == {"message", "type", *(() if anthropic else ("param", "code"))}
        assert "\n" not in error["message"] and "Traceback" not in error["message"]


# In every run each field gets a third of the values, which are not those of its neighbours.
@pytest.mark.parametrize("third", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize(("path", "field"), FIELDS, ids=lambda part: part.strip("/"))
def test_every_field(
    server: Running, path: str, field: str, third: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = BODIES[path][0].model_fields[field].alias or field
    for value in VALUES[(FIELDS.index((path, field)) + third) % 3 :: 3]:
        fields = {"model": f'"{MODEL}"', **BODIES[path][1], name: value}
        if name in ("max_tokens", "max_output_tokens") and value == "null":
            continue  # valid, and long
        body = ",".join(f'"{key}":{text}' for key, text in fields.items())
        judge(*post(server, path, f"{{{body}}}"))
    assert "Traceback" not in caplog.text and "a step of the engine failed" not in caplog.text


MESSAGE = '{"model":"%s","max_tokens":2,"messages":[%s]%s}'
TOOL = ',"tools":[{"type":"function","function":{"name":"f","parameters":%s}}]%s'
CALL = '{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"a","arguments":"ARGS"}}]}'
PARTS = (
    (r'{"role":"user","content":"\ud800"}', ""),
    (r'{"role":"user","content":[{"type":"text","text":"\ud800"}]}', ""),
    (r'{"role":"user","content":"x","name":"\ud800"}', ""),
    (CALL.replace("ARGS", ARRAYS), ""),
    ('{"role":"user","content":"x"}', TOOL % (r'{"a":"\ud800"}', ',"tool_choice":"required"')),
    ('{"role":"user","content":"x"}', TOOL % (DEEP, ',"tool_choice":"required"')),
    ('{"role":"user","content":"x"}', TOOL % ('{"type":5}', ',"tool_choice":"required"')),
)


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_messages_and_tools(server: Running, part: int) -> None:
    judge(*post(server, "/v1/chat/completions", MESSAGE % (MODEL, *PARTS[part])))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"\xff", b"\x00", b'{"model":"\xed\xa0\x80"}']
)
@pytest.mark.parametrize("path", list(BODIES))
def test_bodies_that_are_none(server: Running, path: str, body: bytes) -> None:
    status, answer = post(server, path, body)
    assert status == 400
    judge(status, answer)


def test_what_is_wrong_is_said(server: Running) -> None:
    ask = '{"model":"%s","max_tokens":2,"prompt":%s}'
    status, body = post(server, "/v1/completions", ask % (MODEL, r'"\ud800"'))
    assert status == 400 and "half a surrogate pair" in body["error"]["message"]
    assert body["error"]["param"] == "prompt"
    status, body = post(
        server, "/v1/completions", ask % (MODEL, f'"x","logit_bias":{{"{LONG}":1}}')
    )
    assert status == 400 and body["error"]["param"] == "logit_bias"
    status, body = post(server, "/tokenize", r'{"prompt":"\ud800"}')
    assert status == 400 and "half a surrogate pair" in body["error"]["message"]


def test_a_chat_without_max_tokens_ends_where_the_cache_does(target: LLM) -> None:
    """Not refused: the cache's size is the limit, and is told as such."""
    per_token = target.with_draft().engine.cache
    width = sum(t.nbytes for layer in per_token._layers for t in layer)
    blocks = 12
    memory = width * blocks // per_token.num_blocks
    llm = target.with_draft(kv_cache_memory=memory, max_batch_size=2)
    assert llm.max_model_len == 16 * blocks < llm.target.max_positions
    for running in serve(service_of(llm, deadline=60.0)):
        ask = MESSAGE % (MODEL, '{"role":"user","content":"Hi"}', ',"ignore_eos":true')
        ask = ask.replace('"max_tokens":2,', "")
        status, body = post(running, "/v1/chat/completions", ask)
        assert status == 200 and body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["total_tokens"] == llm.max_model_len
        _, tokens = post(running, "/tokenize", '{"prompt":"x"}')
        assert tokens["max_model_len"] == llm.max_model_len
        long = json.dumps({"model": MODEL, "prompt": [7] * 200})
        status, body = post(running, "/v1/completions", long)
        assert status == 400 and body["error"]["code"] == "context_length_exceeded"
        for word in ("200 tokens", "the cache holds 192", "raise kv_cache_memory"):
            assert word in body["error"]["message"]


def test_the_server_is_as_well_as_before(server: Running) -> None:
    """Runs last: nothing is left of all that."""
    loop, pool = server.service.client, server.service.client.engine.llm.engine.cache.pool
    assert loop.alive and loop.idle
    assert pool.available == pool.total

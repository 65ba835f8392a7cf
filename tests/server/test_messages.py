"""``/v1/messages``, as Anthropic's API is; by its own package in tests/clients."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.request.completion import Completion, CompletionStats, StreamEvent
from paceline.server.api.anthropic import MessagesAnswer
from paceline.server.api.protocol import FunctionDefinition, Tool
from paceline.server.api.tools import ForcedCallParser, TextParser, ToolCallParser
from support.asking import Reply, ask
from support.running_server import MODEL, Running

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"name": "get_weather", "description": "Looks.", "input_schema": SCHEMA}
HELLO = [{"role": "user", "content": "Hello"}]


def say(server: Running, messages: Any = HELLO, **fields: Any) -> Reply:
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0, **fields}
    return ask(server.url, "/v1/messages", body, {"anthropic-version": "2023-06-01"})


def count(server: Running, messages: Any = HELLO, **fields: Any) -> int:
    body = {"model": MODEL, "messages": messages, **fields}
    return int(ask(server.url, "/v1/messages/count_tokens", body).json["input_tokens"])


def total(usage: dict[str, int]) -> int:
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_the_text_is_a_chat_s(server: Running) -> None:
    cache = {"cache_control": {"type": "ephemeral"}}
    answer = say(server, system=[{"type": "text", "text": "Be brief.", **cache}]).json
    body = {
        "messages": [{"role": "system", "content": "Be brief."}, *HELLO],
        "max_tokens": 12,
        "temperature": 0,
    }
    chat = ask(server.url, "/v1/chat/completions", body).json
    (block,) = answer["content"]
    assert block == {"type": "text", "text": chat["choices"][0]["message"]["content"]}
    assert answer["stop_reason"] == "max_tokens" and answer["role"] == "assistant"
    assert total(answer["usage"]) == chat["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == 12
    assert total(answer["usage"]) == count(server, system="Be brief.")


@pytest.mark.parametrize(
    "fields", [{}, {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 60}]
)
def test_a_stream_is_the_whole(server: Running, fields: dict[str, Any]) -> None:
    whole = say(server, **fields).json
    streamed = say(server, **fields, stream=True)
    names = [line[7:] for line in streamed.text.splitlines() if line.startswith("event: ")]
    events = streamed.chunks
    assert names == [event["type"] for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    (block,) = whole["content"]
    if block["type"] == "text":
        assert "".join(delta["text"] for delta in deltas) == block["text"]
    else:
        assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]
        assert block["name"] == "get_weather" and set(block["input"]) == {"city"}
    assert events[-2]["delta"] == {
        "stop_reason": whole["stop_reason"],
        "stop_sequence": whole["stop_sequence"],
    }
    assert whole["stop_reason"] == ("tool_use" if fields else "max_tokens")
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_tools_and_their_results(server: Running) -> None:
    named = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    first = say(server, tools=[TOOL], tool_choice=named, max_tokens=60).json
    (use,) = first["content"]
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}
    conversation = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "so"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    assert say(server, conversation, tools=[TOOL]).status == 200
    blocks = [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]
    conversation[-1]["content"][0]["content"] = blocks
    assert say(server, conversation, tools=[TOOL], tool_choice={"type": "none"}).status == 200


def test_a_call_that_is_cut(server: Running) -> None:
    answer = say(server, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=20).json
    (use,) = answer["content"]
    assert (use["name"], use["input"], answer["stop_reason"]) == ("get_weather", {}, "max_tokens")


def test_stop_sequences_and_prefill(server: Running) -> None:
    text = say(server, max_tokens=40).json["content"][0]["text"]
    stop = text[8:11]
    # Of two that begin together the shorter one is complete first.
    answer = say(server, max_tokens=40, stop_sequences=["never said", text[8:13], stop]).json
    assert answer["stop_reason"] == "stop_sequence" and answer["stop_sequence"] == stop
    assert answer["content"][0]["text"] == text[: text.index(stop)]
    begun = [*HELLO, {"role": "assistant", "content": text[:8]}]
    assert count(server, begun) < count(server, [*begun, *HELLO])
    assert say(server, begun).status == 200


def test_structured_output(server: Running) -> None:
    format = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_config": {"format": format}}, {"output_format": format}):
        text = say(server, **fields, max_tokens=60).json["content"][0]["text"]
        assert set(json.loads(text)) == {"city"}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "words"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens: Field required"),
        ({"model": "other"}, 404, "not_found_error", "does not exist"),
        ({"beams": 4}, 400, "invalid_request_error", "'beams'"),
        ({"n": 2}, 400, "invalid_request_error", "n must be 1 here"),
        ({"stop_sequences": ["a"] * 17}, 400, "invalid_request_error", "stop_sequences: List"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            400,
            "invalid_request_error",
            "tools: tools of type 'web_search_20250305' are not run here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0: a part of type 'image' is not supported",
        ),
        (
            {"messages": [{"role": "user", "content": "word " * 5000}]},
            400,
            "invalid_request_error",
            "prompt is too long: This model's maximum context length is 1024 tokens",
        ),
    ],
)
def test_errors_in_anthropic_s_shape(
    server: Running, fields: dict[str, Any], status: int, kind: str, words: str
) -> None:
    refused = say(server, **{"messages": HELLO, **fields})
    assert refused.status == status
    assert refused.json["type"] == "error" and refused.error["type"] == kind
    assert words in refused.error["message"]
    assert refused.json["request_id"] == refused.headers["x-request-id"]


def test_what_claude_code_asks(server: Running) -> None:
    """The fields of its first request, with shorter texts."""
    cached = {"type": "text", "text": "Helpful.", "cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "Today."}, {"type": "text", "text": "Hello"}]
    messages = [{"role": "user", "content": parts}, {"role": "system", "content": "Agents."}]
    answer = say(
        server,
        messages,
        stream=True,
        system=[{"type": "text", "text": "Billing."}, cached],
        tools=[TOOL],
        metadata={"user_id": "{}"},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
    )
    assert answer.status == 200, answer.text
    assert answer.chunks[-1]["type"] == "message_stop"


def test_what_has_no_effect_is_ignored(server: Running) -> None:
    answer = say(
        server,
        metadata={"user_id": "x"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        service_tier="auto",
    )
    assert answer.status == 200
    shown = say(server, return_token_ids=True, speculation={"stats": True, "tokens": True})
    assert shown.status == 200
    search = {"type": "web_search_20250305", "name": "web_search"}
    beside = say(server, tools=[TOOL, search])
    assert beside.status == 200


def inputs_of(text: str, parser: TextParser) -> list[Any]:
    """The inputs of the calls in an answer with this text."""
    body = SimpleNamespace(logprobs=False, request_id=None, stop=(), model=MODEL, receipt=False)
    chat: Any = SimpleNamespace(
        service=SimpleNamespace(tokenizer=None, model=MODEL),
        body=body,
        prompt=[1],
        new_parser=lambda: parser,
    )
    stats = CompletionStats(0, 0, None, 1.0, [], 1, 0.1, 10.0)
    done = Completion("", text, [5], None, "stop", 0, [False], stats)
    event = StreamEvent(0, 0, done.text, [5], [False], done)
    return [block["input"] for block in MessagesAnswer(chat).complete([event])["content"]]


def test_two_calls_keep_their_inputs() -> None:
    """The second begins before the first has been closed."""
    tools = [Tool(type="function", function=FunctionDefinition(name="look"))]
    calls = [f'<tool_call>{{"name": "look", "arguments": {{"at": {n}}}}}</tool_call>' for n in "12"]
    inputs = inputs_of("".join(calls), ToolCallParser(tools, parallel=True))
    assert inputs == [{"at": 1}, {"at": 2}]


@pytest.mark.parametrize("nested", [1, 100_000])  # the second is deeper than Python's recursion
def test_an_input_that_cannot_be_parsed_is_empty(nested: int) -> None:
    text = '{"name": "look", "arguments": {"at": ' + "[" * nested
    assert inputs_of(text, ForcedCallParser()) == [{}]

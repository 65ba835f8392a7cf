"""The ``anthropic`` package against ``/v1/messages``."""

from __future__ import annotations

import pytest

from support.served_process import Served

anthropic = pytest.importorskip("anthropic")

TOOL = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
HELLO = [{"role": "user", "content": "Name a city."}]


@pytest.fixture
def client(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.root, api_key="none", max_retries=0, timeout=120)


def test_messages(served: Served, client: anthropic.Anthropic) -> None:
    options = {"model": served.model, "max_tokens": 24, "messages": HELLO}
    greedy = {"extra_body": {"temperature": 0}}  # which the package knows no more
    cached = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(**options, system=cached, **greedy)
    with client.messages.stream(**options, system="Be brief.", **greedy) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(
        model=served.model, messages=HELLO, system="Be brief."
    ).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_tools(served: Served, client: anthropic.Anthropic) -> None:
    options = {"model": served.model, "max_tokens": 80, "tools": [TOOL]}
    first = client.messages.create(**options, messages=HELLO, tool_choice={"type": "any"})
    assert first.stop_reason == "tool_use"
    use = first.content[0]
    assert use.name == "get_weather" and set(use.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    conversation = [
        *HELLO,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**options, messages=conversation).role == "assistant"
    named = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(**options, messages=HELLO, tool_choice=named) as stream:
        assert set(stream.get_final_message().content[0].input) == {"city"}


def test_errors(served: Served, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=4, messages=HELLO)
    long = [{"role": "user", "content": "word " * 50_000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model=served.model, max_tokens=4, messages=long)

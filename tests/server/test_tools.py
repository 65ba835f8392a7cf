"""Function calls: forced by a grammar, found in text, streamed; and how conversations show them."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from paceline import LLM, SamplingParams
from paceline.server.api.chat import render
from paceline.server.api.protocol import ChatMessage, ChatRequest, Tool
from paceline.server.api.tools import ToolCallParser, forced_grammar, message_from_deltas
from support.asking import ask
from support.running_server import MODEL, Running


def tool(name: str, parameters: dict[str, Any] | None = None) -> Tool:
    function = {"name": name, "parameters": parameters or {"type": "object"}}
    return Tool.model_validate({"type": "function", "function": function})


TOOLS = [tool("add"), tool("find")]
CALL = '{"name": "add", "arguments": {"a": 1}}'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
OTHER = '{"name": "find", "arguments": {}}'
QUOTING = '{"name": "add", "arguments": {"a": "```</tool_call> {[\\\\\\"}"}}'
DEEP = '[{"name":' + "[" * 100_000 + "]" * 100_000 + "}]"


@pytest.mark.parametrize(
    ("text", "rest", "names"),
    [
        (CALL, "", ["add"]),
        (LLAMA, "", ["add"]),
        (f"<|python_tag|>{LLAMA}", "", ["add"]),
        (f"<tool_call>\n{CALL}\n</tool_call>", "", ["add"]),
        (f"Let me see.\n<tool_call>{CALL}</tool_call>", "Let me see.", ["add"]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>", "", ["add", "find"]),
        (f"<tool_call>{CALL}", "", ["add"]),
        (f"[TOOL_CALLS] [{CALL}, {OTHER}]", "", ["add", "find"]),
        (f"```json\n{CALL}\n```", "", ["add"]),
        (f"Let me see:\n```json\n{CALL}\n```", f"Let me see:\n```json\n{CALL}\n```", []),
        (f"<tool_call>{QUOTING}</tool_call>", "", ["add"]),
        ('{"name": "add", "arguments": null}', "", ["add"]),
        (f" <tool_call>{CALL}</tool_call> and\n[TOOL_CALLS]{OTHER}", "and", ["add", "find"]),
        (f"<tool_call>{CALL}</tool_call><tool_call>{{x", "<tool_call>{x", ["add"]),
        (f"{CALL} is a call", f"{CALL} is a call", []),
        (f"[{CALL}, 1]", f"[{CALL}, 1]", []),
        ('{"name": ["add"], "arguments": {}}', '{"name": ["add"], "arguments": {}}', []),
        ('{"name": "add", "arguments": NaN}', '{"name": "add", "arguments": NaN}', []),
        (DEEP, DEEP, []),
        ("Four.", "Four.", []),
        ("", "", []),
        ('{"name": "delete", "arguments": {}}', '{"name": "delete", "arguments": {}}', []),
        ('{"name": "add", "arg', '{"name": "add", "arg', []),
        ("[1, 2]", "[1, 2]", []),
    ],
)
def test_calls_in_text(text: str, rest: str, names: list[str]) -> None:
    stream = ToolCallParser(TOOLS, parallel=True)
    deltas = stream.feed(text)
    last, reason = stream.finish("stop")
    message = message_from_deltas([*deltas, *last])
    calls = message.get("tool_calls", [])
    assert message["content"] == (rest or None if names else rest)
    assert reason == ("tool_calls" if names else "stop")
    assert [call["function"]["name"] for call in calls] == names
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


PERSON = {
    "type": "object",
    "properties": {"who": {"$ref": "#/$defs/person"}},
    "required": ["who"],
    "additionalProperties": False,
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["age"],
            "additionalProperties": False,
        }
    },
}


def chat_request(**fields: Any) -> ChatRequest:
    base = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    return ChatRequest.model_validate({**base, **fields})


def test_references_inside_parameters_still_lead_somewhere(target: LLM) -> None:
    body = chat_request(
        tools=[t.model_dump() for t in (tool("greet", PERSON), tool("part", PERSON))],
        tool_choice="required",
    )
    params = SamplingParams(grammar=forced_grammar(body), max_tokens=60)
    call = json.loads(target.generate("Call a function: ", params)[0].text)
    assert call["name"] in ("greet", "part")
    assert 0 <= call["arguments"]["who"]["age"] <= 99


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({}, {}),
        ({"parameters": {}}, {}),
        # The schema does not say that it is an object.
        ({"parameters": {"properties": {"a": {"const": 1}}, "required": ["a"]}}, {"a": 1}),
    ],
)
def test_arguments_are_an_object(
    target: LLM, parameters: dict[str, Any], arguments: dict[str, Any]
) -> None:
    now = {"type": "function", "function": {"name": "now", **parameters}}
    body = chat_request(tools=[now], tool_choice="required")
    params = SamplingParams(grammar=forced_grammar(body), max_tokens=60)
    text = target.generate("Call a function: ", params)[0].text
    assert json.loads(text) == {"name": "now", "arguments": arguments}


def test_no_grammar_unless_forced() -> None:
    tools = [tool("add").model_dump()]
    assert forced_grammar(chat_request(tools=tools)) is None
    assert forced_grammar(chat_request(tools=tools, tool_choice="none")) is None
    with pytest.raises(ValidationError, match="tool_choice needs tools"):
        chat_request(tool_choice="required")
    with pytest.raises(ValidationError, match="not among the tools"):
        named = {"type": "function", "function": {"name": "other"}}
        chat_request(tools=tools, tool_choice=named)


def test_a_form_of_the_text_is_ignored_where_a_forced_call_leaves_none(server: Running) -> None:
    asked = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "tools": [tool("add").model_dump()],
        "response_format": {"type": "json_object"},
    }
    for choice in ("required", "auto"):
        answer = ask(server.url, "/v1/chat/completions", {**asked, "tool_choice": choice})
        assert answer.status == 200


CONVERSATION = [
    ChatMessage(role="user", content="1 + 1?"),
    ChatMessage.model_validate(
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        }
    ),
    ChatMessage(role="tool", content="2", tool_call_id="c1"),
]


def test_templates_without_tools_get_a_description(target: LLM) -> None:
    text = target.tokenizer.decode(
        render(target.tokenizer, chat_request(messages=CONVERSATION, tools=TOOLS))
    )
    assert '"name": "add"' in text and '"name": "find"' in text
    assert "Result of the call: 2" in text
    assert '"arguments": {"a": 1}' in text


def test_templates_with_tools_get_them(target: LLM) -> None:
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = (
        "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}:{{ c.function.arguments.a }}{% endfor %}"
        "{{ m.tool_call_id }}{% endfor %}"
    )
    text = tokenizer.decode(render(tokenizer, chat_request(messages=CONVERSATION, tools=TOOLS)))
    assert text == "[add][find]<user>1 + 1?<assistant>add:1<tool>2c1"


def test_special_tokens_that_mark_calls_are_seen(target: LLM) -> None:
    """A tag that is a special token is part of the text where tools are about."""
    special = target.tokenizer.convert_ids_to_tokens([1])[0]
    params = SamplingParams(max_tokens=2, logit_bias={1: 100.0}, ignore_eos=True)
    hidden = target.generate("Hello", params)[0].text
    shown = target.generate("Hello", replace(params, skip_special_tokens=False))[0].text
    assert special not in hidden
    assert shown == special * 2


@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_a_model_makes_by_itself(server: Running, stream: bool) -> None:
    """A grammar stands in for a model that has learnt to call: the answer is a call as text."""
    schema = {
        "type": "object",
        "properties": {"name": {"const": "add"}, "arguments": {"const": {"a": 1}}},
    }
    schema |= {"required": ["name", "arguments"], "additionalProperties": False}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "1 + 1?"}],
        "tools": [tool("add").model_dump(exclude_none=True)],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "stream": stream,
        "temperature": 0,
        "max_tokens": 60,
    }
    answer = ask(server.url, "/v1/chat/completions", body)
    if stream:
        choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
        calls = [c for choice in choices for c in choice["delta"].get("tool_calls", [])]
        reason = choices[-1]["finish_reason"]
        assert not any(choice["delta"].get("content") for choice in choices)
    else:
        choice = answer.json["choices"][0]
        calls, reason = choice["message"]["tool_calls"], choice["finish_reason"]
    assert reason == "tool_calls"
    assert calls[0]["function"] == {"name": "add", "arguments": '{"a": 1}'}

"""``/v1/responses``, by OpenAI's own package and as its events are."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from paceline.server.api.responses import (
    MAX_BYTES,
    ResponseStore,
    StoredResponse,
)
from support.asking import Reply, ask
from support.running_server import MODEL, Running

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def respond(server: Running, **fields: Any) -> Reply:
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 12, "temperature": 0, **fields}
    return ask(server.url, "/v1/responses", body)


def text_of(response: dict[str, Any]) -> str:
    parts = [p for item in response["output"] for p in item.get("content", ())]
    return "".join(part["text"] for part in parts)


def test_the_text_is_a_chat_s(server: Running, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="Hello", instructions="Be brief.", max_output_tokens=12, temperature=0
    )
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ],
        max_tokens=12,
        temperature=0,
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    cut = chat.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if cut else "completed")
    if cut:
        assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "required"}])
def test_a_stream_is_the_whole(server: Running, fields: dict[str, Any]) -> None:
    fields = {**fields, "max_output_tokens": 40}
    whole = respond(server, **fields).json
    events = respond(server, **fields, stream=True).chunks
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", f"response.{whole['status']}"]
    last = events[-1]["response"]
    for response in (whole, last):
        (
            response.pop("id"),
            response.pop("created_at"),
            response["usage"].pop("input_tokens_details"),
        )
        for item in response["output"]:
            item.pop("id"), item.pop("call_id", None)
    assert last == whole
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    if fields.get("tools"):
        assert "".join(deltas) == whole["output"][0]["arguments"]
        assert set(json.loads("".join(deltas))) == {"city"}
    else:
        assert "".join(deltas) == text_of(whole) and len(deltas) > 3


def test_the_stream_helper_reads_it(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "input": "Hello", "max_output_tokens": 60, "temperature": 0}
    with client.responses.stream(**options, tools=[TOOL], tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert set(json.loads(final.output[0].arguments)) == {"city"}


def test_going_on_from_an_answer(server: Running) -> None:
    first = respond(server).json
    assert ask(server.url, f"/v1/responses/{first['id']}").json == first
    kept = respond(server, input="And?", previous_response_id=first["id"])
    said = [
        {"role": "user", "content": "Hello"},
        *first["output"],
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    named = [said[0], {"type": "item_reference", "id": first["output"][0]["id"]}, said[2]]
    for answer in (kept, respond(server, input=said), respond(server, input=named)):
        assert answer.status == 200
        assert text_of(answer.json) == text_of(kept.json)
        assert answer.json["usage"]["input_tokens"] == kept.json["usage"]["input_tokens"]
    assert ask(server.url, f"/v1/responses/{first['id']}", method="DELETE").json["deleted"]
    for path in (f"/v1/responses/{first['id']}",):
        assert ask(server.url, path).status == 404
    gone = respond(server, previous_response_id=first["id"])
    assert gone.status == 404 and gone.error["param"] == "previous_response_id"
    unkept = respond(server, store=False).json
    assert respond(server, previous_response_id=unkept["id"]).status == 404


def test_results_of_calls(server: Running) -> None:
    call = respond(server, tools=[TOOL], tool_choice="required", max_output_tokens=60).json
    assert call["status"] == "completed"
    (item,) = call["output"]
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
    for fields in (
        {"input": [{"role": "user", "content": "Hello"}, item, output]},
        {"input": [output], "previous_response_id": call["id"]},
    ):
        answer = respond(server, tools=[TOOL], **fields)
        assert answer.status == 200, answer.text


@pytest.mark.parametrize(
    "field",
    [
        {"metadata": {"a": "\ud800"}},
        {"tools": [{**TOOL, "description": "\ud800"}]},
        {"text": {"format": {"type": "json_schema", "schema": {"title": "\ud800"}}}},
        {"previous_response_id": "\ud800"},
    ],
)
def test_half_a_surrogate_pair_is_refused_before_the_answer(
    server: Running, field: dict[str, Any]
) -> None:
    """The response repeats these fields, and cannot be encoded with it."""
    reply = respond(server, **field)
    assert reply.status == 400 and "half a surrogate pair" in reply.error["message"]


def test_structured_output_and_logprobs(server: Running) -> None:
    format = {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}
    answer = respond(server, text={"format": format}, max_output_tokens=60).json
    assert set(json.loads(text_of(answer))) == {"city"} and answer["text"]["format"] == format
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = respond(server, **fields).json["output"]
    entries = item["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == item["content"][0]["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_what_codex_asks(server: Running) -> None:
    """The fields of its first request, with shorter texts."""

    def said(role: str, text: str) -> dict[str, Any]:
        part = {"type": "input_text", "text": text}
        return {"type": "message", "id": f"msg_{text}", "role": role, "content": [part]}

    group = {"type": "namespace", "name": "agents", "description": "x", "tools": [TOOL]}
    answer = respond(
        server,
        stream=True,
        input=[said("developer", "Code."), said("developer", "Skills."), said("user", "Hello")],
        tools=[TOOL, group, {"type": "web_search", "external_web_access": False}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="x",
        client_metadata={"thread_id": "x"},
    )
    assert answer.status == 200, answer.text
    assert answer.chunks[-1]["type"] in ("response.completed", "response.incomplete")


def test_functions_in_namespaces(server: Running) -> None:
    """As Codex offers them; a call says the namespace beside the name."""
    group = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [TOOL]}
    other = {**TOOL, "name": "other", "defer_loading": False, "output_schema": None}
    named = {"type": "function", "namespace": "agents", "name": "get_weather"}
    fields = {"tools": [other, group], "tool_choice": named, "max_output_tokens": 60}
    whole = respond(server, **fields).json
    (item,) = whole["output"]
    assert (item["namespace"], item["name"]) == ("agents", "get_weather")
    assert [tool["type"] for tool in whole["tools"]] == ["function", "namespace"]
    events = respond(server, **fields, stream=True).chunks
    (added,) = (event for event in events if event["type"] == "response.output_item.added")
    assert (added["item"]["namespace"], added["item"]["name"]) == ("agents", "get_weather")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
    said = [{"role": "user", "content": "Hello"}, item, output]
    assert respond(server, tools=[group], input=said).status == 200
    assert respond(server, tools=[other], tool_choice=named).status == 400


def test_tools_of_other_servers_beside_functions_are_left_out(server: Running) -> None:
    search = {"type": "web_search", "external_web_access": False}
    answer = respond(server, tools=[TOOL, search])
    assert answer.status == 200
    assert [tool["type"] for tool in answer.json["tools"]] == ["function"]
    custom = respond(server, tools=[TOOL, {"type": "custom", "name": "patch"}])
    assert custom.status == 400 and custom.error["param"] == "tools.1.type"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": 5}, "input", "Input should be a valid string"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "items of type 'computer_call'"),
        ({"input": [{"role": "user"}]}, "input.0", "'content' is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0",
            "a part of type 'input_image' is not supported",
        ),
        ({"input": [{"role": "boss", "content": "x"}]}, "input", "'system'"),
        ({"input": []}, "input", "at least 1"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools of type 'web_search' are not run"),
        ({"conversation": "x"}, "conversation", "conversations are not stored"),
        ({"background": True}, "background", "background responses are not supported"),
        ({"n": 2}, "n", "n must be 1 here"),
    ],
)
def test_errors(server: Running, fields: dict[str, Any], param: str | None, words: str) -> None:
    refused = respond(server, **fields)
    assert refused.status == 400, refused.text
    assert words in refused.error["message"]
    assert param is None or refused.error["param"] == param


def test_what_has_no_effect_is_ignored(server: Running) -> None:
    answer = respond(
        server,
        include=["reasoning.encrypted_content", "a\nb\x11ä"],
        reasoning={"effort": "low", "summary": "auto"},
        background=False,
        truncation="disabled",
        metadata={"a": "b"},
        user="x",
    )
    assert answer.json["metadata"] == {"a": "b"}


def made(name: str, text: str = "", said: Any = (), **fields: Any) -> StoredResponse:
    item = {"id": f"msg_{name}_0", "text": text}
    shown = {"id": f"resp_{name}", "output": [item], **fields}
    return StoredResponse([{"role": "user", "content": "x"}, *said], shown)


def test_the_store_is_bounded() -> None:
    store = ResponseStore()
    store.add("", made("beyond", "x" * (MAX_BYTES + 1)))
    assert not store.size
    for number in range(3):
        store.add("", made(f"huge{number}", "x" * (MAX_BYTES * 4 // 10)))
    assert store.get("", "resp_huge0") is None and store.item("", "msg_huge0_0") is None
    store.add("", made("small", "y"))
    assert store.get("", "resp_huge1") is not None  # and is the latest now
    assert store.item("", "msg_small_0") == {"id": "msg_small_0", "text": "y"}
    assert store.item("", "msg_small_1") is None and store.item("", "nothing") is None
    store.add("", made("huge3", "x" * (MAX_BYTES * 4 // 10)))
    assert store.get("", "resp_huge2") is None and store.get("", "resp_huge1") is not None
    assert store.size <= MAX_BYTES


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": "x" * 1000},
        {"tools": [{"parameters": {"description": "x" * 1000}}]},
        {"said": [{"role": "assistant", "tool_calls": [{"arguments": "x" * 1000}]}]},
        {"text": "\ud800" * 334},
    ],
)
def test_the_store_counts_all_that_it_keeps_and_gives_it_back(fields: dict[str, Any]) -> None:
    store = ResponseStore()
    store.add("", made("0"))
    little = store.size
    for number in range(1, 10):
        store.add("", made(f"{number}", **fields))
    assert store.size > little + 9 * 1000
    assert store.get("", "resp_9") == made("9", **fields)
    for number in range(1, 10):
        store.remove("", f"resp_{number}")
    assert store.size == little and store.get("", "resp_9") is None


def test_a_stored_response_belongs_to_its_owner() -> None:
    store = ResponseStore()
    store.add("quiet", made("quiet"))
    assert store.get("quiet", "resp_quiet") is not None
    assert store.get("busy", "resp_quiet") is None and store.item("busy", "msg_quiet_0") is None
